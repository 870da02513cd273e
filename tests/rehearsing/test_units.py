"""What FSDP2 gathers and sends is told apart from activations."""

import pytest
from torch import nn

from tests.rehearsing.tasks import Tokens, rehearsed


def test_gradients_that_are_reduced_together_are_each_modules_own() -> None:
    """FSDP's of one block lie in one tensor: a second micro-step finds those of the first there."""
    task = Tokens(hidden=128, seq=256, vocab=2048)
    told = rehearsed(task, "fsdp", 4, "train.micro_batch=1", "train.global_batch=8")
    assert told.at == "backward of the loss"
    held = {one.module: one.bytes for one in told.holdings if one.category == "gradients"}
    model = {name: tensor.nbytes // 4 for name, tensor in task.model().named_parameters()}
    for part in ("attention.out", "feed_forward.up", "feed_forward.down", "attention_norm"):
        own = sum(size for name, size in model.items() if name.startswith("layers") and f".{part}." in name)
        assert held[f"layers.*.{part}"] == pytest.approx(own, rel=0.01), part
    assert held["embedding"] == pytest.approx(model["embedding.weight"], rel=0.01)
    assert held["output"] == pytest.approx(model["output.weight"], rel=0.01)


@pytest.mark.parametrize(("rank", "ways"), [(0, 1), (1, 2), (2, 1)])
def test_what_stages_receive_is_the_pipelines(rank: int, ways: int) -> None:
    told = rehearsed(Tokens(), "pp=3", 3, "train.micro_steps=4", rank=rank)
    held = {one.module: one.bytes for one in told.holdings if one.category == "activations"}
    # A stage receives what the one before made of a micro-step, and gradients of what it has sent: of 2 x 32 tokens.
    assert held["the pipeline"] == pytest.approx(ways * 4 * 2 * 32 * 64 * 4, rel=0.001)
    assert ("loss" in {one.module for one in told.holdings}) == (rank == 2)
    gradients = {one.module: one.bytes for one in told.holdings if one.category == "gradients"}
    weights = {one.module: one.bytes for one in told.holdings if one.category == "weights"}
    assert gradients == {name: weights[name] for name in gradients}, "of parameters alone"


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
