"""The second pass, in a low precision: near-ties of a router hide nothing and accuse nobody; the scale of float16."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from allranks.layout import Layout
from allranks.request import TrainRequest
from allranks.training.prepare import prepare
from allranks.verifying import lowered
from allranks.verifying.choosing import Choosing
from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import Finding
from allranks.verifying.low_precision import judge_low_precision
from allranks.verifying.lowered import (
    PIECES,
    SHAKES,
    LoweredOne,
    Rounding,
    needs_shakes,
    roundings,
    run_alone_lowered,
    run_lowered,
)
from allranks.verifying.observer import Observer
from allranks.verifying.pieces import Pieces
from allranks.verifying.plan import plan_run
from allranks.verifying.recording import OneDevice, Part, RunRecord
from allranks.verifying.routing import Recorder, Replayer
from allranks.verifying.task_alone import TaskAlone, Variation
from allranks.verifying.task_ranks import Errand, TaskRecord
from allranks.verifying.world_view import WorldView
from tests.commands import POINTS, PROGRAMS

TIES = str(PROGRAMS / "near_ties.py")
EXPERTS = str(PROGRAMS.parents[1] / "corpus" / "task_experts.py")
PLAIN = Rounding(Variation())
SEVEN = roundings(Layout())
WORDS = ("train.global_batch=64", "train.steps=1")

LOUD = """
import torch
from torch import nn
import allranks


class Loud(allranks.Task):
    times: float = 1.0
    defaults = {"train.global_batch": 8, "optimizer.name": "sgd"}

    def dataset(self, split):
        return [(torch.full((4,), 1.0 + index), torch.ones(2)) for index in range(8)]

    def model(self):
        return nn.Linear(4, 2)

    def loss(self, output, batch):
        return ((output - batch[1]) * self.times).sum()
"""


def run(pieces: int, decide: Any, rounding: Rounding = PLAIN, precision: str = "bfloat16") -> RunRecord:
    """One step of the Task of near-ties, whose products are added up in so many pieces."""
    words = (*WORDS, f"train.precision={precision}", f"task.pieces={pieces}")
    prepared = prepare(TrainRequest(task_spec=TIES, overrides=words))
    observer, low = Observer(), getattr(torch, precision)
    choosing = None if decide is None else Choosing(decide)
    with observer.watching(), Pieces(rounding.pieces):
        return TaskAlone(prepared.task, prepared.config, 1, observer, rounding.variation, low, choosing=choosing).run()


class Compared:
    """One device, what rounding moves it by with its routing and without, and another kernel's run, both ways."""

    def __init__(self, precision: str) -> None:
        recorder = Recorder()
        self.first = run(1, recorder.decide, precision=precision)
        self.replayer = Replayer(recorder.recorded(), getattr(torch, precision))
        self.replayed = [run(1, self.replayer.decide, rounding, precision) for rounding in SEVEN]
        self.free = [run(1, None, rounding, precision) for rounding in SEVEN[:4]]
        self.replayer.replayed = 0
        self.other, self.other_free = (run(16, decide, precision=precision) for decide in (self.replayer.decide, None))

    def judge(self, variants: Sequence[RunRecord], rank: RunRecord, factor: float = 1.0) -> list[Finding]:
        """What is found where one gradient of the other kernel's run is off by a factor."""
        raw = rank.steps[0].raw
        kept = raw["2.weight"]
        raw["2.weight"] = Part(None, kept.value * factor)
        found = judge_low_precision(Evidence(OneDevice(self.first, variants), [rank], WorldView((0,)), own_types=False))
        raw["2.weight"] = kept
        return found


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def compared(request: pytest.FixtureRequest) -> Compared:
    return Compared(request.param)


@pytest.mark.full
def test_near_ties_that_rounding_decides_otherwise_are_no_difference(compared: Compared) -> None:
    assert compared.replayer.replayed > 5
    assert compared.judge(compared.replayed, compared.other) == []
    assert {f.verdict.kind for f in compared.judge(compared.replayed, compared.other_free)}, "they are one without it"


@pytest.mark.sample(2)
def test_two_percent_are_found_beside_near_ties(compared: Compared) -> None:
    assert [found.tensor for found in compared.judge(compared.replayed, compared.other, 1.02)] == ["2.weight"]
    assert [found.tensor for found in compared.judge(compared.replayed, compared.other, 0.98)] == ["2.weight"]
    assert compared.judge(compared.free, compared.other_free, 1.02) == [], "what routing moves would hide them"


def alone(task: str, *words: str) -> LoweredOne:
    fixed = ("train.steps=1", "train.precision=float16", *words)
    return run_alone_lowered(Errand(TrainRequest(task_spec=task, overrides=fixed, nproc=1), 1, ""))


def test_the_scale_of_float16_leaves_room(tmp_path: Path) -> None:
    """A gradient of n at the output is n * 36 at the weight, a sum over samples that are at most 8."""
    program = tmp_path / "loud.py"
    program.write_text(LOUD)
    small, large = alone(str(program)), alone(str(program), "task.times=4.0")
    # Divided by the 8 samples: 4.5 at the weight, which 2**12 times room leaves within 65504, and 2**14 does not.
    assert (small.scale, large.scale) == (2.0**10, 2.0**8) and small.recorded == {}
    assert torch.equal(small.one.run.steps[0].raw["weight"].value, torch.full((2, 4), 4.5))
    assert small.one.variants == [], "no rounding moves halves: all are copies of the first"
    assert not alone(str(program), "task.times=1e6").fits


@pytest.mark.parametrize(("stateful", "ordered"), [(False, False), (False, True), (True, False)])
def test_samples_go_one_by_one_only_where_that_is_the_same(
    stateful: bool, ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the order in a batch means something, nor where a forward moves state of its own."""
    seen: list[Variation] = []

    def noted(*given: Any, **more: Any) -> TaskAlone:
        seen.append(given[4])
        return TaskAlone(*given, **more)

    monkeypatch.setattr(lowered, "TaskAlone", noted)
    (tmp_path / "loud.py").write_text(LOUD)
    words = ("train.steps=1", "train.precision=bfloat16")
    request = TrainRequest(task_spec=str(tmp_path / "loud.py"), overrides=words, nproc=1)
    run_alone_lowered(Errand(request, 1, "", forwards=2, stateful=stateful), ordered=ordered)
    assert any(one.apart for one in seen) == (not stateful and not ordered)
    assert {one.forwards for one in seen} == ({2} if stateful else {None})


def test_products_are_cut_as_tensor_parallelism_cuts_them() -> None:
    assert [one.pieces for one in roundings(Layout(tp=4))] == [1, *PIECES, 6, 1] == [one.pieces for one in SEVEN]
    assert 8 in [one.pieces for one in roundings(Layout(dp_shard=1, tp=8))]
    assert [one.variation.exact for one in SEVEN] == [False] * 5 + [True]
    assert not any(one.variation.shake for one in SEVEN) and all(one.variation.shake for one in SHAKES)


def test_every_rounding_is_another_run() -> None:
    found = alone(TIES, "train.precision=bfloat16").one
    raw = [run.steps[0].raw["1.inner.weight"].value for run in (found.run, *found.variants)]
    assert len(raw) == 1 + len(SEVEN), "no shakes beside products in pieces"
    assert len({tensor.numpy().tobytes() for tensor in raw}) == len(raw)


@pytest.mark.parametrize(
    ("gather", "cut", "whole", "needed"),
    [(None, 5, 0, False), (None, 0, 0, True), (None, 5, 1, True), ("bfloat16", 5, 0, True), ("float32", 5, 0, False)],
)
def test_parameters_are_shaken_where_pieces_leave_something_out(
    gather: Literal["bfloat16", "float32"] | None, cut: int, whole: int, needed: bool
) -> None:
    some = Pieces(2)
    some.cut, some.whole = cut, whole
    assert needs_shakes(Layout(gather=gather), [Pieces(1), some]) is needed


def test_a_convolution_is_shaken(tmp_path: Path) -> None:
    program = tmp_path / "convolved.py"
    program.write_text(
        LOUD.replace(
            "nn.Linear(4, 2)", "nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3), nn.Tanh(), nn.Flatten())"
        )
    )
    with_shakes = alone(str(program), "train.precision=bfloat16").one.variants
    assert len(with_shakes) >= len(SHAKES) and all(not run.error for run in with_shakes)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp,recompute=full", "dp_replicate=2,ep=2", "tp=2", "cp=2", "pp=2"])
def test_rows_are_recognised_however_a_model_is_spread(layout: str) -> None:
    """8 or 9 samples of 8 tokens pass through two layers."""
    plan = plan_run(TrainRequest(task_spec=EXPERTS, layout=layout, overrides=("train.precision=bfloat16",)), 2)
    request = replace(plan.request, overrides=(*plan.request.overrides, "train.precision=bfloat16"))
    found = run_lowered(request, Errand(plan.request, 2, ""), plan.nproc)
    rows = plan.config.train.global_batch * 8 * 2
    assert sum(record.recognised for record in found.ranks) in (rows, 2 * rows), "by tp ranks and recomputed ones twice"


def test_what_overflows_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    request = TrainRequest(task_spec=POINTS, overrides=("train.precision=float16",), nproc=2)
    one = run(1, None)
    wild = RunRecord(steps=[SimpleNamespace(raw={"w": Part(None, torch.tensor([torch.inf]))})])  # type: ignore[list-item]

    def launched(answers: Sequence[Any]) -> Callable[..., Any]:
        left = list(answers)
        return lambda *args, **options: left.pop(0)

    monkeypatch.setattr(lowered, "launch_without_gpus", launched([[LoweredOne(OneDevice(one))], [TaskRecord(wild)]]))
    found = run_lowered(request, Errand(request, 2, ""), 2)
    assert not found.comparable and found.note == "not compared in float16: its first step overflows"
    monkeypatch.setattr(lowered, "launch_without_gpus", launched([[LoweredOne(OneDevice(wild), fits=False)]]))
    assert "not finite on one device" in run_lowered(request, Errand(request, 2, ""), 2).note
    monkeypatch.setattr(
        lowered, "launch_without_gpus", launched([[LoweredOne(OneDevice(one))], [TaskRecord(one, replayed=3)]])
    )
    found = run_lowered(request, Errand(request, 2, ""), 2)
    assert found.note == "and the first step in float16; 3 near-ties of its routing were decided as on one device"
    assert found.comparable
