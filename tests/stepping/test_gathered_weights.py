"""What goes from block to block where FSDP gathers weights in 16 bits, as a forward with such weights has it."""

import pytest
import torch
from torch import nn

from allranks.stepping.profile import trace_module, trace_task
from allranks.task import Task
from tests.profiling.subjects import CLASSES, WIDTH, Adversaries, Words
from tests.rehearsing.tasks import Tokens


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("task", "precision", "shares"),
    [
        (Words(), "bfloat16", [0.5, 0.5, 0.5]),
        (Tokens(), "float8", [0.5, 0.5, 0.5]),
        (Words(), "float32", [1.0, 1.0, 1.0]),
        (Words(), "float16", [1.0, 1.0, 1.0]),
        (Words(make="encoder"), "bfloat16", [0.5, 1.0, 1.0]),  # its last norm is float32, whatever the weights are
        (Words(make="moe"), "bfloat16", [0.5, 1.0, 1.0]),  # as experts are
        (Adversaries(), "bfloat16", [1.0]),
    ],
)
def test_what_goes_from_block_to_block_where_weights_are_gathered_in_16_bits(
    task: Task, precision: str, shares: list[float]
) -> None:
    """Of a text model half of it: an embedding gives the type of its table, and autocast leaves sums as they are."""
    if precision == "float8":
        pytest.importorskip("torchao", reason="torchao is not installed: allranks[float8]")
    profile = trace_task(task, precision, "cuda")
    assert [block.low_share for block in profile.blocks][: len(shares)] == shares
    assert {block.low_share for block in trace_task(task, precision, "cpu").blocks} == {1.0}, "gathers in float32"


class Wide(nn.Module):
    """Runs with weights of float32 alone, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.layer.weight.dtype is torch.float32
        found: torch.Tensor = self.layer(x)
        return found


def test_a_model_that_does_not_run_with_gathered_weights_is_traced_all_the_same() -> None:
    """And is left as it was found: every forward after that one has its own weights again."""
    model = Wide()
    samples = [(torch.zeros(WIDTH), 0) for _ in range(3)]
    profile = trace_module(lambda: model, samples, lambda output, batch: output.sum(), device="cuda")
    assert {block.low_share for block in profile.blocks} == {1.0}
    assert isinstance(model.layer.weight, nn.Parameter) and model.layer.weight.dtype is torch.float32
