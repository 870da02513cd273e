"""What a precision means: parameters, what autocast lowers, what is gathered."""

import importlib
import platform
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from allranks.errors import ConfigError
from allranks.parallel.precision import choose_precision, describe_gather, times_of_float32, warn_of_precision
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny

precision_module: Any = importlib.import_module("allranks.parallel.precision")


@pytest.mark.parametrize(
    ("name", "gather", "device", "parameters", "compute", "gathered"),
    [
        ("float32", None, "cpu", torch.float32, None, torch.float32),
        ("float32", None, "cuda", torch.float32, None, torch.float32),
        ("float64", None, "cuda", torch.float64, None, torch.float64),
        ("float64", "float32", "cpu", torch.float64, None, torch.float64),
        ("bfloat16", None, "cpu", torch.float32, torch.bfloat16, torch.float32),
        ("bfloat16", None, "cuda", torch.float32, torch.bfloat16, torch.bfloat16),
        ("float16", None, "cpu", torch.float32, torch.float16, torch.float32),
        ("float16", None, "cuda", torch.float32, torch.float16, torch.float32),
        ("bfloat16", "float32", "cuda", torch.float32, torch.bfloat16, torch.float32),
        ("bfloat16", "bfloat16", "cpu", torch.float32, torch.bfloat16, torch.bfloat16),
        ("float8", None, "cpu", torch.float32, torch.bfloat16, torch.float32),
        ("float8", None, "cuda", torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_table(
    name: str,
    gather: str | None,
    device: str,
    parameters: torch.dtype,
    compute: torch.dtype | None,
    gathered: torch.dtype,
) -> None:
    found = choose_precision(name, gather, device)
    assert (found.name, found.parameters, found.compute, found.gather) == (name, parameters, compute, gathered)
    policy = found.fsdp_policy()
    rounds = gathered is not parameters
    assert (policy.param_dtype, policy.reduce_dtype) == ((gathered, parameters) if rounds else (None, None))
    # FSDP would round floating inputs too, and what the user's loss is given.
    assert not policy.cast_forward_inputs
    assert policy.output_dtype is None


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout\.gather=bfloat16 with train\.precision=float16"):
        choose_precision("float16", "bfloat16", "cuda")
    with pytest.raises(ConfigError, match=r"layout\.gather=bfloat16 with train\.precision=float32"):
        choose_precision("float32", "bfloat16", "cuda")


def test_inputs_follow_float64_only() -> None:
    batch = {"x": torch.ones(2), "pair": (torch.ones(2, dtype=torch.int64), torch.ones(1, dtype=torch.float16)), "n": 3}
    wide = choose_precision("float64", None, "cpu").cast_inputs(batch)
    assert isinstance(wide, dict)
    assert wide["x"].dtype is wide["pair"][1].dtype is torch.float64
    assert (wide["pair"][0].dtype, wide["n"]) == (torch.int64, 3)
    assert choose_precision("bfloat16", None, "cpu").cast_inputs(batch) is batch


def test_batches_are_placed_and_cast() -> None:
    batch = {"x": torch.ones(2), "n": 3}
    placed: Any = choose_precision("float64", None, "cpu").place(batch, torch.device("meta"))
    assert placed["x"].is_meta and placed["x"].dtype is torch.float64 and placed["n"] == 3
    assert choose_precision("bfloat16", None, "cpu").place(batch, torch.device("cpu")) is batch


def test_outputs_are_float32_before_the_loss() -> None:
    precision = choose_precision("bfloat16", None, "cpu")
    linear, x = nn.Linear(3, 2), torch.randn(4, 3)
    with precision.autocast("cpu"):
        low = linear(x)
    assert low.dtype is torch.bfloat16
    output = precision.cast_output({"logits": low, "classes": low.argmax(-1), "exact": low.double()})
    assert isinstance(output, dict)
    assert [part.dtype for part in output.values()] == [torch.float32, torch.int64, torch.float64]
    assert torch.equal(output["logits"], low.float())


@dataclass
class Output:
    logits: torch.Tensor


def test_outputs_in_a_dataclass_are_float32_too() -> None:
    output = Output(torch.ones(2, dtype=torch.float16))
    raised: Any = choose_precision("float16", None, "cpu").cast_output({"first": output})
    assert raised["first"].logits.dtype is torch.float32


def test_without_a_lower_type_nothing_is_touched() -> None:
    precision = choose_precision("float32", None, "cpu")
    with precision.autocast("cpu"):
        assert nn.Linear(3, 2)(torch.randn(4, 3)).dtype is torch.float32
    half = torch.ones(2, dtype=torch.bfloat16)
    assert precision.cast_output(half) is half


def seconds_are(monkeypatch: pytest.MonkeyPatch, seconds: dict[torch.dtype, float]) -> None:
    monkeypatch.setattr(precision_module, "_seconds_of_product", seconds.__getitem__)


def test_how_slow_float16_is_has_been_timed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    float16 = choose_precision("float16", None, "cpu")
    for seconds, times in ((0.0234, 23), (0.004, 4)):
        seconds_are(monkeypatch, {torch.float32: 0.001, torch.float16: seconds, torch.bfloat16: 0.0005})
        (warning,) = warn_of_precision(float16, "cpu")
        assert warning.what == f"warning: float16 takes about {times} times as long as float32 here"
        assert warning.because.endswith("; bfloat16 takes 0.5 times as long")
    seconds_are(monkeypatch, {torch.float32: 0.001, torch.float16: 0.0009, torch.bfloat16: 0.0005})
    assert warn_of_precision(float16, "cpu") == (), "it takes no longer"


def test_the_products_that_are_timed_are_few_and_real_ones_in_a_rehearsal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = list[torch.Tensor]()
    multiply = torch.mm

    def note(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        multiplied.append(one)
        return multiply(one, other)

    monkeypatch.setattr(torch, "mm", note)
    with FakeTensorMode():
        assert min(times_of_float32()) > 0
    assert {type(matrix) for matrix in multiplied} == {torch.Tensor}
    assert Counter(matrix.dtype for matrix in multiplied) == dict.fromkeys(
        (torch.float32, torch.float16, torch.bfloat16), 3
    )


def test_float16_alone_scales_and_is_warned_of_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("float32", "bfloat16", "float16", "float64")
    chosen = {name: choose_precision(name, None, "cpu") for name in names}
    seconds_are(monkeypatch, {torch.float32: 0.001, torch.float16: 0.0234, torch.bfloat16: 0.0005})
    assert [name for name in names if chosen[name].scales] == ["float16"]
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for instructions, warned in (({}, 1), ({"avx512_fp16": True}, 0), ({"amx_fp16": True, "avx512_fp16": False}, 0)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=instructions: found, raising=False)
        assert len(warn_of_precision(chosen["float16"], "cpu")) == warned
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert warn_of_precision(chosen["float16"], "cuda") == warn_of_precision(chosen["bfloat16"], "cpu") == ()
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert warn_of_precision(chosen["float16"], "cpu") == ()


def test_a_gather_in_a_lower_type_is_said() -> None:
    (chosen,) = describe_gather(choose_precision("bfloat16", None, "cuda"), None)
    assert chosen.what == "parameters are rounded to bfloat16 where they are gathered"
    assert chosen.because.startswith("half the traffic, under train.precision=bfloat16 on GPUs; layout.gather=float32")
    (asked,) = describe_gather(choose_precision("bfloat16", "bfloat16", "cpu"), "bfloat16")
    assert asked.because.startswith("layout.gather says so; ")
    assert describe_gather(choose_precision("bfloat16", None, "cpu"), None) == ()
    assert describe_gather(choose_precision("bfloat16", "float32", "cuda"), "float32") == ()


class Turned(nn.Module):
    """A block with what must not be rounded: angles that are made anew, and a count that is kept and grows."""

    kept: torch.Tensor
    angles: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("kept", torch.tensor(1 / 3, dtype=torch.float32))
        self.register_buffer("angles", 10_000.0 ** -torch.linspace(0, 1, 5), persistent=False)
        self.seen = set[tuple[torch.dtype, bool]]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = torch.equal(self.angles, 10_000.0 ** -torch.linspace(0, 1, 5))
        self.seen |= {(self.kept.dtype, True), (self.angles.dtype, exact)}
        found: torch.Tensor = self.linear(x) * self.angles.cos() + x
        if self.training:
            self.kept.add_(2.0**-20)  # lost at once in half
        return found


class TurnedTask(Tiny):
    def model(self) -> nn.Module:
        return nn.Sequential(Turned(), Turned(), nn.Linear(5, 3))


def run_turned(layout: str, *more: str) -> tuple[set[tuple[torch.dtype, bool]], dict[str, tuple[torch.dtype, float]]]:
    """In a worker: what forwards saw of the buffers, and those it has at the end."""
    session = session_of(TurnedTask(), config_of(layout, *more, precision="bfloat16", steps=3))
    list(step_through(session, 3))
    blocks = [module for module in session.spread.modules[""].modules() if isinstance(module, Turned)]
    seen = {one for block in blocks for one in block.seen}
    return seen, {str(at): (block.kept.dtype, float(block.kept)) for at, block in enumerate(blocks)}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp layout.gather=bfloat16"])
def test_buffers_of_a_block_stay_in_float32(pool: Pools, layout: str) -> None:
    for seen, kept in pool(2).run(run_turned, *layout.split(" ")):
        assert seen == {(torch.float32, True)}
        assert {dtype for dtype, _ in kept.values()} == {torch.float32}
        assert all(1 / 3 < value < 1 / 3 + 1e-4 for _, value in kept.values())
