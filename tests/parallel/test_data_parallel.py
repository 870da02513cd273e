"""nn.DataParallel: what it changes, what it says, and what it splits and gathers."""

import importlib
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter_gather

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.models.moe import MoETransformer
from allranks.parallel.block_modes import change_blocks
from allranks.parallel.blocks import find_blocks
from allranks.parallel.data_parallel import Copies, describe_gathering, split_over_devices
from allranks.verdict import Decision
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import MODELS, Tiny
from tests.parallel.spreads import spread


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs says")
def test_without_gpus_it_says_that_it_changes_nothing() -> None:
    found = spread(lambda: nn.Linear(3, 2), Layout(kind="data_parallel"))
    assert isinstance(found.modules[""], nn.DataParallel) and isinstance(found.bare(), nn.Linear)
    assert list(found.map) == ["weight", "bias"]
    assert [str(decision) for decision in found.decisions] == [
        "data_parallel changes nothing here, because there is no GPU, and it splits over GPUs; see --layout ddp"
    ]
    session = session_of(Tiny(), config_of("data_parallel", "train.global_batch=5"))
    assert len(list(step_through(session, 2))) == 2
    said = [str(decision) for decision in session.decisions]
    assert "the outputs of a sample take 24 B on the first device, where there are several" in " ".join(said)


def test_with_several_it_says_what_it_does() -> None:
    linear = nn.Linear(3, 2)
    said: list[Decision] = []
    split_over_devices({"": linear}, 1, said)
    modules = split_over_devices({"a": linear}, 4, said)
    assert modules["a"].module is linear
    assert said[0].because == "there is one GPU, and it splits over GPUs; see --layout ddp"
    assert said[1].what == "each forward copies the model to 4 GPUs, splits the batch, gathers outputs on the first"
    with pytest.raises(LayoutError, match=re.escape("keeps those of the first of 2: use --layout ddp")):
        split_over_devices({"": nn.Sequential(linear, nn.BatchNorm1d(2))}, 2, said)
    experts = MoETransformer(7, 2, 8, 2, num_experts=3, top_k=1, max_seq=4)
    with pytest.raises(LayoutError, match=r"count the tokens of the first of 2 GPUs alone: use --layout ddp"):
        split_over_devices({"": experts}, 2, said)
    split_over_devices({"": experts}, 1, said)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_threads_compute_in_the_type_of_the_call(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast's type is a thread's own: as torch starts its threads, with autocast and no type."""
    seen: list[tuple[torch.dtype, object]] = []

    def in_threads(replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Sequence[Any], devices: object) -> list[Any]:
        threads = [
            threading.Thread(target=replica, args=given, kwargs=named)
            for replica, given, named in zip(replicas, inputs, kwargs, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [None] * len(threads)

    def look(*given: object, **named: object) -> None:
        seen.append((torch.get_autocast_dtype("cuda"), (given, named)))

    monkeypatch.setattr(importlib.import_module("torch.nn.parallel.data_parallel"), "parallel_apply", in_threads)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype or before)
    torch.set_autocast_enabled("cuda", dtype is not None)
    try:
        Copies(nn.Linear(3, 2)).parallel_apply([look, look], [(1,), (2,)], [{"y": 3}, {}])
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert sorted(seen, key=str) == [(dtype or torch.float16, ((1,), {"y": 3})), (dtype or torch.float16, ((2,), {}))]


def test_gpus_beside_a_run_on_the_processor_are_not_taken() -> None:
    with pytest.raises(LayoutError, match=r"takes the 2 GPU\(s\) of this machine, and the device is cpu: .* hide them"):
        split_over_devices({"": nn.Linear(3, 2)}, 2, [], torch.device("cpu"))
    split_over_devices({"": nn.Linear(3, 2)}, 0, [], torch.device("cpu"))


def test_a_mode_of_blocks_is_refused_where_there_are_copies() -> None:
    """A copy of a block would compute with the first GPU's."""
    model = MODELS["tied"]()
    change_blocks({"": model}, find_blocks({"": model}), Layout(recompute="full"), torch.device("cpu"))
    block: Any = model.get_submodule("blocks.0")
    assert block._replicate_for_data_parallel().forward is block.forward
    split_over_devices({"": model}, 1, [])
    with pytest.raises(LayoutError, match=r"the copies of blocks\.0 would run the first GPU's forward, which rec"):
        split_over_devices({"": model}, 2, [])


def test_the_gathered_outputs_are_counted() -> None:
    output = {"a": torch.zeros(4, 1000), "b": [torch.zeros(4, dtype=torch.int64), "words"]}
    assert "take 4,008 B on the first GPU" in str(describe_gathering(output, 4, 2))


class Scatter:
    """In place of torch's move of pieces to several devices: the pieces stay where they are."""

    @staticmethod
    def apply(devices: Sequence[int], _: Any, dim: int, value: torch.Tensor) -> Sequence[torch.Tensor]:
        return value.chunk(len(devices), dim)


class Gather:
    """In place of torch's move of pieces to one device."""

    @staticmethod
    def apply(device: int, dim: int, *pieces: torch.Tensor) -> torch.Tensor:
        assert device == 0, "the first one"
        return torch.cat(pieces, dim)


class Told(nn.Module):
    """Takes and returns tensors in containers, and notes what each call gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.calls: list[tuple[int, int, str]] = []

    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, word: str) -> dict[str, Any]:
        self.calls.append((len(batch["x"]), len(scale), word))
        found = self.linear(batch["x"]) * scale
        return {"logits": found, "more": [found.sum(1), None]}


def test_what_it_splits_and_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's forward, and its ways through containers, over two devices: only moves are made up, as there is no other.

    Torch's own replicate, parallel_apply, Scatter and Gather refuse a processor; `test_it_splits_and_gathers` has them.
    """
    model, said = Told(), list[Decision]()
    called: Any = split_over_devices({"": model}, 2, said)[""]
    assert isinstance(called, nn.DataParallel) and called.module is model and len(said) == 1
    monkeypatch.setattr(scatter_gather, "Scatter", Scatter)
    monkeypatch.setattr(scatter_gather, "Gather", Gather)
    moves = {
        "device_ids": [0, 1],
        "output_device": 0,
        "src_device_obj": torch.device("cpu"),
        "dim": 0,
        "replicate": lambda module, devices: [module] * len(devices),
        "parallel_apply": lambda copies, inputs, more: [
            c(*i, **k) for c, i, k in zip(copies, inputs, more, strict=True)
        ],
    }
    for name, move in moves.items():
        monkeypatch.setitem(vars(called), name, move)
    x, scale = torch.arange(15.0).reshape(5, 3), torch.arange(1.0, 6.0).unsqueeze(1)
    output = called({"x": x}, scale=scale, word="w")
    assert model.calls == [(3, 3, "w"), (2, 2, "w")]
    expected = model.linear(x) * scale
    assert torch.equal(output["logits"], expected)
    assert torch.equal(output["more"][0], expected.sum(1)) and output["more"][1] is None
    assert "take 12 B on the first GPU" in str(describe_gathering(output, 5, 2))
    output["logits"].sum().backward()
    weight = model.linear.weight.grad
    assert weight is not None and torch.equal(weight, (x * scale).sum(0).expand(2, 3))
    model.calls.clear()
    called({"x": x[:1]}, scale=scale[:1], word="w")
    assert model.calls == [(1, 1, "w")], "one sample, one device"


@pytest.mark.gpu
def test_it_splits_and_gathers() -> None:
    seen = []
    module = nn.Linear(3, 2).cuda()
    module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].device, len(inputs[0]))))
    called = split_over_devices({"": module}, torch.cuda.device_count(), [])
    x = torch.ones(8, 3, device="cuda")
    output = called[""](x)
    assert output.device == torch.device("cuda:0")
    assert torch.allclose(output, module(x))
    lengths = [length for _, length in seen[:-1]]
    # With one GPU nothing is split: the one call gets all.
    assert lengths == [len(part) for part in x.chunk(torch.cuda.device_count())]
