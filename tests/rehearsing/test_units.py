"""What FSDP2 gathers and sends is told apart from activations."""

import pytest
from torch import nn

from tests.rehearsing.tasks import Tokens, rehearsed


def test_gathered_memory_is_named_after_its_unit() -> None:
    told = rehearsed(Tokens(hidden=128, seq=8, vocab=2048), "fsdp,sharding=grad_op", 4, on_cuda=True)
    units = {one.module for one in told.holdings if one.category == "gathered"}
    assert units == {"layers.*", "the rest"}
    model: nn.Module = Tokens(hidden=128, seq=8, vocab=2048).model()
    whole, block = (
        sum(p.numel() * p.element_size() for p in m.parameters()) for m in (model, model.get_submodule("layers.2"))
    )
    assert told.at == "backward of layers.1"  # layers.2 is dropped by then
    assert told.by_category["gathered"] == pytest.approx(whole - block, rel=0.01)
