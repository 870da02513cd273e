"""What every hand-written strategy has to learn: one process that has the whole model and the whole batch."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from allranks.benchmarking.subject import LR, MAX_NORM, SIZES, Tokens, make_model, make_moe
from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key


def plain_losses(steps: int, batch: int, *, experts: bool = False) -> list[float]:
    """Of `steps` steps of `batch` samples, with seed 0."""
    torch.manual_seed(0)
    model: Any = make_moe("tiny") if experts else make_model("tiny")
    data = Tokens(SIZES["tiny"].seq, steps * batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    order = permute(steps * batch, epoch_key(0, 0), torch.arange(steps * batch).numpy()).tolist()
    found = []
    for step in range(steps):
        samples = [data[index] for index in order[step * batch : (step + 1) * batch]]
        x, y = (torch.stack([sample[name] for sample in samples]) for name in ("x", "y"))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if experts:
            model.update_balance()
        found.append(float(loss.detach()))
    return found
