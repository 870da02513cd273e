"""The reference: at most 60 lines of plain torch that import nothing of ours; and it computes what torch's own does."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import allranks.verifying.one_device
from allranks.verifying.one_device import evaluate_on_one_device, train_on_one_device

FILE = Path(allranks.verifying.one_device.__file__)
MAX_LINES = 60


def test_it_is_short_and_imports_nothing_of_ours() -> None:
    assert len(FILE.read_text().splitlines()) <= MAX_LINES
    names = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add((node.module or "").partition(".")[0])
    assert names == {"collections", "typing", "torch"}


def test_it_divides_once_clips_and_moves_the_rate() -> None:
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    ours = nn.Linear(3, 1).double()
    ours.load_state_dict(model.state_dict())
    told: list[tuple[int, str, float, float]] = []
    train_on_one_device(
        {"": ours},
        {"": torch.optim.SGD(ours.parameters(), lr=0.1)},
        [(x, y), (x, y)],
        lambda models, batch: iter([("", ((models[""](batch[0]) - batch[1]) ** 2).sum(), 5)]),
        lambda step: 1.0 - 0.5 * step,
        0.01,
        lambda *what: told.append(what),
        lambda step: None,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, rate in enumerate((0.1, 0.05)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert list(told[step][2:]) == pytest.approx([float(loss.detach()), float(norm)])
        optimizer.step()
    assert torch.allclose(ours.weight, model.weight, rtol=1e-13)


def test_metrics_are_sums_over_counts() -> None:
    terms = [{"loss": (3.0, 2), "hits": (1, 2)}, {"loss": (1.0, 2)}]
    assert evaluate_on_one_device(terms) == {"loss": 1.0, "hits": 0.5}
