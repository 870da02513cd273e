"""Embeddings and last layers of which each tp rank has the rows of some of the words."""

from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn import functional

from allranks.losses import ChunkedHead, chunked_cross_entropy
from allranks.parallel.tensor_flow import CHANNELS, Flow
from allranks.parallel.tensor_ops import gather, leave, part_bounds
from allranks.vocabulary import CutLogits, CutVocabulary


@final
class TensorVocabulary(CutVocabulary):
    """The words of a tp rank: `num_words` cut as `torch.chunk` cuts them.

    Args:
        group: the tp ranks.
    """

    def __init__(self, num_words: int, group: dist.ProcessGroup) -> None:
        size = dist.get_world_size(group)
        self.start, self.end = part_bounds(num_words, size, dist.get_rank(group))
        self.num_words = num_words
        self.axis = f"tp={size}"
        self._group = group

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """As declared."""
        return leave(value, self._group)

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """As declared."""
        found = value.detach().clone()
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """As declared."""
        return gather(part, self._group, CHANNELS, self.num_words)


def score_words(
    module: Any, flow: Flow, value: torch.Tensor, targets: torch.Tensor | None = None
) -> torch.Tensor | CutLogits:
    """The forward of a last layer: whole logits, or this rank's where the loss is parallel.

    A `ChunkedHead` that is given `targets` returns the loss of each position, and nobody ever has whole logits.
    """
    entered = flow.enter(value, cut=flow.meets_positions(module))
    words = TensorVocabulary(module.out_features, flow.group)
    if targets is not None:
        assert isinstance(module, ChunkedHead)
        how: Any = {"bias": module.bias, "chunk": module.chunk, "reduction": "none", "vocabulary": words}
        losses = chunked_cross_entropy(entered, module.weight, targets, **how)
        flow.pass_head()
        return losses
    found = functional.linear(entered, module.weight, module.bias)
    flow.pass_head()
    return CutLogits(found, words) if flow.loss_parallel else words.whole(found)


def embed_words(module: Any, flow: Flow, tokens: torch.Tensor) -> torch.Tensor:
    """The forward of an `nn.Embedding`, whole or cut along the sequence."""
    start, end = part_bounds(module.num_embeddings, dist.get_world_size(flow.group), flow.rank)
    valid = ((tokens >= 0) & (tokens < module.num_embeddings)).all()
    if tokens.device.type != "cpu":
        torch._assert_async(valid)
    elif not valid:
        raise IndexError(f"a token outside of 0 to {module.num_embeddings - 1}")
    here = (tokens >= start) & (tokens < end)
    padding = module.padding_idx
    padding = padding - start if padding is not None and start <= padding < end else None
    rows = torch.where(here, tokens - start, 0)
    if end == start:
        looked_up = module.weight.new_zeros((*tokens.shape, module.embedding_dim)) + module.weight.sum()
    else:
        looked_up = functional.embedding(rows, module.weight, padding) * here.unsqueeze(-1)
    return flow.leave(looked_up, opens=True)
