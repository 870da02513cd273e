"""layout.local_sgd: copies that train by themselves are what a plain loop over copies computes (law 4's exceptions)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.errors import CheckpointError
from allranks.stepping.session import Session
from allranks.verifying.parity import RecordedStep, compare, record_run
from allranks.verifying.reference import ReferenceStep, plain_loop
from allranks.verifying.reference_replicas import local_loop
from tests.distributed.matrix_models import update_balance
from tests.distributed.pool import Pools
from tests.distributed.scaled import Heavy
from tests.distributed.sessions import SGD, config_of, initial_model, parts_of, processes_of, session_of, step_through
from tests.distributed.tasks import IGNORED, Points, Tiny
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

STEPS, EVERY = 6, 3
ADAM = ("optimizer.name=adamw", "optimizer.lr=0.001")
# 13 samples in 2 micro-steps: uneven, and of unevenly many targets.
BATCH = ("train.global_batch=13", "train.micro_steps=2")
EVEN = ("train.global_batch=24", "train.micro_steps=4")  # a pipeline wants one shape
LOCAL = (f"layout.local_sgd={EVERY}",)
AVERAGING = ("layout.outer_lr=1.0", "layout.outer_momentum=0.0")
# (layout, processes, for each copy one process of each share of its samples, the processes of each copy)
LAYOUTS: dict[str, tuple[str, int, list[list[int]], list[list[int]]]] = {
    "single": ("ddp", 2, [[0], [1]], [[0], [1]]),
    "three": ("ddp", 3, [[0], [1], [2]], [[0], [1], [2]]),
    "shard": ("dp_replicate=2,dp_shard=2", 4, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "optimizer": ("dp_replicate=2,dp_shard=2,sharding=optimizer", 4, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "tp": ("dp_replicate=2,tp=2", 4, [[0], [2]], [[0, 1], [2, 3]]),
    "cp": ("dp_replicate=2,cp=2", 4, [[0], [2]], [[0, 1], [2, 3]]),
    "pp": ("dp_replicate=2,pp=2", 4, [[0], [1]], [[0, 2], [1, 3]]),
    "placement": ("placement,dp_replicate=2", 2, [[0], [1]], [[0], [1]]),
    "ep": ("dp_replicate=2,dp_shard=2,ep=2", 4, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "ep-shards": ("dp_replicate=2,dp_shard=4,ep=2", 8, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "ep-optimizer": ("dp_replicate=2,dp_shard=2,ep=2,sharding=optimizer", 4, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
}


def recorded(kind: str, layout: str, *overrides: str) -> list[RecordedStep]:
    config = config_of(layout, *(EVEN if "pp=" in layout else BATCH), *overrides, steps=STEPS)
    return record_run(Tiny(kind=kind), config, processes_of(config), STEPS)


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def batches_of(
    task: Tiny, ranks: Sequence[Sequence[RecordedStep]], shares: Sequence[Sequence[int]]
) -> list[tuple[list[Any], int]]:
    """Of every step each copy's batch, and the targets of all."""
    steps = []
    for step in range(STEPS):
        batches = []
        for ranks_of_copy in shares:
            samples = [sample for rank in ranks_of_copy for sample in ranks[rank][step].samples]
            batch = default_collate([task.dataset("train")[sample] for sample in samples])
            x = batch["x"].double() if batch["x"].is_floating_point() else batch["x"]
            batches.append(batch | {"x": x})
        steps.append((batches, sum(int((batch["y"] != IGNORED).sum()) for batch in batches)))
    return steps


def simulated(
    kind: str,
    ranks: Sequence[Sequence[RecordedStep]],
    shares: Sequence[Sequence[int]],
    *,
    rate: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    max_norm: float | None = None,
    every: int = EVERY,
    finish: Callable[[nn.Module], None] = update_balance,
) -> list[list[ReferenceStep]]:
    task = Tiny(kind=kind)
    return local_loop(
        initial_model(task).double(),
        make_sgd,
        batches_of(task, ranks, shares),
        lambda model, batch: task.loss(model(batch["x"]), batch),
        lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum, nesterov=nesterov),
        every,
        max_norm,
        finish=finish,
    )


def check(
    ranks: Sequence[Sequence[RecordedStep]], copies: Sequence[Sequence[int]], expected: list[list[ReferenceStep]]
) -> None:
    for members, reference in zip(copies, expected, strict=True):
        differences = compare([ranks[rank] for rank in members], reference)
        assert not differences, "; ".join(map(str, differences[:5]))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in LAYOUTS for kind in ("transformer", "scalars") if not case.startswith("ep")]
    + [(case, "moe") for case in ("single", "shard", "tp", "pp", "ep", "ep-shards", "ep-optimizer")],
)
def test_copies_are_what_a_loop_over_copies_computes(pool: Pools, case: str, kind: str) -> None:
    layout, size, shares, copies = LAYOUTS[case]
    if (kind, case) == ("scalars", "cp"):
        kind = "tied"
    ranks = pool(size).run(recorded, kind, layout, *SGD, *LOCAL)
    expected = simulated(kind, ranks, shares)
    check(ranks, copies, expected)
    last = [reference[-2].parameters for reference in expected]
    assert any(not torch.equal(last[0][name], last[1][name]) for name in last[0]), "the copies are never apart"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("overrides", "outer"),
    [
        (("layout.outer_momentum=0.5", "layout.outer_nesterov=false"), {"momentum": 0.5, "nesterov": False}),
        (AVERAGING, {"rate": 1.0, "momentum": 0.0, "nesterov": False}),
        (("train.max_norm=0.05",), {"max_norm": 0.05}),
    ],
    ids=str,
)
def test_the_outer_optimizer_and_clipping(pool: Pools, overrides: tuple[str, ...], outer: dict[str, Any]) -> None:
    layout, size, shares, copies = LAYOUTS["shard"]
    ranks = pool(size).run(recorded, "mlp", layout, *SGD, *LOCAL, *overrides)
    check(ranks, copies, simulated("mlp", ranks, shares, **outer))


def test_put_together_in_every_step_by_the_plain_mean_it_is_ddp(pool: Pools) -> None:
    """Copies divide by their even share of the step's targets: so their mean is the gradient of the global batch."""
    plain = ("optimizer.name=sgd", "optimizer.lr=0.1", "layout.local_sgd=1", *AVERAGING)
    ranks = pool(3).run(recorded, "mlp", "ddp", *plain)
    task = Tiny(kind="mlp")
    steps = batches_of(task, ranks, [[0, 1, 2]])
    reference = plain_loop(
        initial_model(task).double(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01),
        [(batch, targets) for (batch,), targets in steps],
        lambda model, batch: task.loss(model(batch["x"]), batch),
    )
    found = [difference for difference in compare(ranks, reference) if "parameter" in difference.what]
    assert not found and ranks[0][-1].loss == pytest.approx(reference[-1].loss, rel=1e-12)


def with_buffers(layout: str) -> tuple[list[RecordedStep], dict[str, torch.Tensor]]:
    task, config = Tiny(kind="batchnorm"), config_of(layout, "train.global_batch=12", *SGD, *LOCAL, steps=STEPS)
    recording = record_run(task, config, processes_of(config), STEPS)
    session = session_of(task, config)
    list(step_through(session, STEPS))
    kinds = session.spread.map.items()
    return recording, {name: session.spread.local(name).clone() for name, entry in kinds if entry.kind == "buffer"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ["single", "three", "shard"])
def test_a_copy_has_statistics_of_its_own_and_then_the_mean(pool: Pools, case: str) -> None:
    """In a copy BatchNorm sees the copy's samples; what it remembers becomes the mean where the copies become one."""
    layout, size, shares, copies = LAYOUTS[case]
    ranks = pool(size).run(with_buffers, layout)
    recordings, models = [recording for recording, _ in ranks], list[nn.Module]()
    check(recordings, copies, simulated("batchnorm", recordings, shares, finish=models.append))
    buffers = dict(models[-1].named_buffers())
    assert len(buffers) > 6
    for _, found in ranks:
        assert found.keys() == buffers.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, buffers[name].to(value.dtype), rtol=1e-12, atol=1e-14)


DECAY = 0.8


def averaged(layout: str) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The average after some steps, and the parameters from the beginning on."""
    config = config_of(layout, *BATCH, *SGD, *LOCAL, f"train.ema={DECAY}", steps=STEPS)
    session = session_of(Tiny(kind="mlp"), config)
    assert session.ema is not None
    names, live = list(session.spread.updatable()), list[dict[str, torch.Tensor]]()
    for _ in step_through(session, STEPS):
        live.append({name: session.spread.local(name).clone() for name in names})
    return {entry.name.removeprefix("ema."): part for entry, part in session.ema.parts()}, live


def test_the_average_of_the_parameters_follows_the_model_that_the_copies_agree_on(pool: Pools) -> None:
    initial = dict(initial_model(Tiny(kind="mlp")).double().named_parameters())
    for found, live in pool(2).run(averaged, "ddp"):
        for name, value in found.items():
            expected = initial[name].detach()
            for met in live[EVERY - 1 :: EVERY]:
                expected = DECAY**EVERY * expected + (1 - DECAY**EVERY) * met[name]
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def on_more(directory: Path) -> tuple[dict[str, torch.Tensor], list[str], str]:
    return restored(directory, "ddp", *LOCAL, "layout.batchnorm=local", kind="batchnorm")


@pytest.mark.parametrize("at", [EVERY, EVERY + 1])
def test_ranks_that_had_statistics_of_their_own_leave_the_model_to_more_of_them(
    pool: Pools, tmp_path: Path, at: int
) -> None:
    saved = pool(2).run(save, tmp_path, "ddp", at, "batchnorm", "layout.batchnorm=local")
    for found, said, _ in pool(3).run(on_more, tmp_path):
        assert "running batch statistics go on from the mean over the ranks" in " ".join(said)
        for name in ("blocks.0.weight", "last.bias"):
            torch.testing.assert_close(found[name], (saved[0][name] + saved[1][name]) / 2, rtol=1e-14, atol=0)


Scaled = list[tuple[dict[str, float], dict[str, torch.Tensor]]]


def scaled(kind: str, steps: int) -> Scaled:
    task = Tiny(kind="mlp") if kind == "mlp" else Heavy(kind="transformer")
    config = config_of("ddp", *BATCH, *SGD, *LOCAL, precision="float16", steps=steps)
    session, found = session_of(task, config), []
    for stepped in step_through(session, steps):
        assert stepped.outcome.scaling is not None
        live = {name: session.spread.local(name).clone() for name in session.spread.trainable()}
        found.append((stepped.outcome.scaling.values(), live))
    return found


def test_copies_in_float16_share_their_scale(pool: Pools) -> None:
    """A step that one of them has to skip is skipped by all; what they learn is what float64 learns, rounded."""
    ranks, exact = pool(2).run(scaled, "mlp", STEPS), pool(2).run(recorded, "mlp", "ddp", *SGD, *LOCAL)
    initial = initial_model(Tiny(kind="mlp"))[0].weight.detach().double()
    for found, true in zip(ranks, exact, strict=True):
        assert [said for said, _ in found] == [said for said, _ in ranks[0]]
        weight = true[-1].parameters["0.weight"][1]
        assert (found[-1][1]["0.weight"] - weight).abs().max() < 0.02 * (weight - initial).abs().max()
    assert alike(ranks, -1) and not alike(ranks, -2)


def alike(ranks: Sequence[Scaled], step: int) -> bool:
    (_, one), (_, other) = (found[step] for found in ranks)
    return all(torch.equal(one[name], other[name]) for name in one)


def test_copies_skip_a_step_together(pool: Pools) -> None:
    """Some samples weigh so much that they overflow at first, in the copy that has them."""
    ranks = pool(2).run(scaled, "heavy", 9)
    for found in ranks:
        assert [said for said, _ in found] == [said for said, _ in ranks[0]]
        skips = [said["skipped_steps"] for said, _ in found]
        skipped = [step for step in range(1, 9) if skips[step] > skips[step - 1] and (step + 1) % EVERY]
        assert skipped and skips[-1] < 9
        for step in skipped:
            assert all(torch.equal(value, found[step - 1][1][name]) for name, value in found[step][1].items())
    assert alike(ranks, 8)


class OneBad(Tiny):
    """One sample is not finite: only the copy that has it leaves that step out."""

    def dataset(self, split: str) -> Any:
        return [
            dict(Points()[index], x=Points()[index]["x"] * (math.nan if index == 5 else 1.0)) for index in range(61)
        ]


def leaving_out(steps: int) -> tuple[list[int], list[bool]]:
    """In a worker: by step how many copies have left the step before out, and whether the ranks are said to part."""
    config = config_of("ddp", *BATCH, *SGD, *LOCAL, steps=steps)
    session = session_of(OneBad(kind="mlp"), config)
    agreed = [stepped.outcome.pending.read() for stepped in step_through(session, steps)]
    return [one.skipped for one in agreed], [one.diverged for one in agreed]


def test_copies_of_which_one_leaves_a_step_out_are_not_said_to_have_parted(pool: Pools) -> None:
    for skipped, diverged in pool(2).run(leaving_out, 5):
        assert sum(skipped) == max(skipped) == 1, "the sample is seen once, by one copy, before the last step"
        assert not any(diverged)


def everything(session: Session) -> dict[str, torch.Tensor]:
    """Parameters, inner and outer optimizer state of this rank."""
    assert session.outer is not None
    kept = {entry.name: part for entry, part in session.outer.parts([], [])}
    kept |= {entry.name: part for other in session.beside for entry, part in other.parts()}
    return kept | {name: part for name, (_, _, part) in parts_of(session).items()}


def resumed(directory: Path, kind: str, layout: str, at: int) -> tuple[bool, list[str], bool]:
    beside = ("train.ema=0.9",) if kind == "tied" else ()
    config = config_of(layout, *(EVEN if "pp=" in layout else BATCH), *ADAM, *LOCAL, *beside, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind=kind), config, at)
    saver_of(session, contents, directory).save(at)
    apart = session.outer is not None and session.outer.apart
    list(step_through(session, 2 * STEPS - at - 1))
    again, contents = contents_of(Tiny(kind=kind), config, 0)
    decisions = contents.load(find(directory, again))
    list(step_through(again, 2 * STEPS - at - 1))
    ours, theirs = everything(session), everything(again)
    assert ours.keys() == theirs.keys()
    alike = all(torch.equal(ours[name], theirs[name]) for name in ours)
    return alike, [str(decision) for decision in decisions], apart


@pytest.mark.sample(6)
@pytest.mark.parametrize("at", [EVERY, EVERY + 1])
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "tied") for case in ("single", "shard", "optimizer", "pp")),
        ("ep", "moe"),
        ("single", "batchnorm"),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    pool: Pools, tmp_path: Path, case: str, kind: str, at: int
) -> None:
    layout, size, *_ = LAYOUTS[case]
    assert pool(size).run(resumed, tmp_path, kind, layout, at) == [(True, [], at > EVERY)] * size


def resumed_without(directory: Path, layout: str, kind: str, without: int) -> bool:
    """In a worker: whether a run goes on as it was whose first step the copy `without` has left out, saved then."""
    config = config_of(layout, *BATCH, *ADAM, *LOCAL, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind=kind), config, 0)
    bad = float("nan") if session.spread.mesh.coordinate("dp_replicate") == without else 1.0

    def alter(batch: StepBatch) -> StepBatch:
        return replace(batch, micro_steps=tuple(_times(bad, one) for one in batch.micro_steps))

    list(step_through(session, 1, alter))
    assert bool(session.optimizers.parts()) == (bad == 1.0), "there is none to begin with"
    saver_of(session, contents, directory).save(1)
    list(step_through(session, EVERY + 1))
    again, contents = contents_of(Tiny(kind=kind), config, 0)
    contents.load(find(directory, again))
    list(step_through(again, EVERY + 1))
    ours, theirs = everything(session), everything(again)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _times(factor: float, micro_step: MicroStep) -> MicroStep:
    return replace(micro_step, batch=dict(micro_step.batch, x=micro_step.batch["x"] * factor))


@pytest.mark.parametrize("without", [0, 1])
@pytest.mark.parametrize("case", ["single", "optimizer"])
def test_a_copy_that_has_made_no_update_yet_is_saved(pool: Pools, tmp_path: Path, case: str, without: int) -> None:
    layout, size, *_ = LAYOUTS[case]
    assert pool(size).run(resumed_without, tmp_path, layout, "mlp", without) == [True] * size


def save(directory: Path, layout: str, at: int, kind: str = "mlp", *overrides: str) -> dict[str, torch.Tensor]:
    config = config_of(layout, *BATCH, *ADAM, *LOCAL, *overrides, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind=kind), config, at)
    saver_of(session, contents, directory).save(at)
    return {name: part for name, (_, _, part) in parts_of(session).items()}


def restored(
    directory: Path, layout: str, *overrides: str, kind: str = "mlp"
) -> tuple[dict[str, torch.Tensor], list[str], str]:
    config = config_of(layout, *BATCH, *ADAM, *overrides, steps=2 * STEPS)
    session, contents = contents_of(Tiny(kind=kind), config, 0)
    checkpoint = find(directory, session)
    decisions = contents.load(checkpoint)
    found = {name: part for name, (_, _, part) in parts_of(session).items()}
    list(step_through(session, 1))
    return found, [str(decision) for decision in decisions], " ".join(checkpoint.manifest.tensors)


def test_another_number_of_copies_begins_with_their_mean(pool: Pools, tmp_path: Path) -> None:
    saved = pool(2).run(save, tmp_path, "ddp", EVERY + 1)
    mean = {name: (saved[0][name] + saved[1][name]) / 2 for name in saved[0]}
    for found, said, names in pool(3).run(restored, tmp_path, "ddp", *LOCAL):
        kinds = "copy, exp_avg, exp_avg_sq, step go on from the mean"
        assert said == [f"{kinds}, because 2 have saved their own, and others go on"]
        assert "optimizer.copy.0.weight@each" in names
        for name, value in mean.items():
            torch.testing.assert_close(found[name], value, rtol=1e-14, atol=0)


def test_it_may_begin_and_end_with_copies(pool: Pools, tmp_path: Path) -> None:
    saved = pool(2).run(save, tmp_path, "ddp", EVERY)
    found, said, names = pool(1).run(restored, tmp_path, "single")[0]
    assert len(said) == 2 and "outer_momentum of the checkpoint are left out" in said[1]
    assert "optimizer.copy." not in names, "where the copies are one, none stands apart"
    for name in ("0.weight", "6.bias"):
        assert torch.equal(found[name], saved[0][name])
    mean = (saved[0]["optimizer.exp_avg.0.weight"] + saved[1]["optimizer.exp_avg.0.weight"]) / 2
    torch.testing.assert_close(found["optimizer.exp_avg.0.weight"], mean, rtol=1e-14, atol=0)


@pytest.mark.parametrize("at", [EVERY, EVERY + 1])
def test_an_average_begins_where_the_copies_are_one(pool: Pools, tmp_path: Path, at: int) -> None:
    pool(2).run(save, tmp_path, "ddp", at)
    assert all(("ema begins" in said) == (at == EVERY) for said in pool(2).run(begun, tmp_path)), "refused, or begun"


def begun(directory: Path) -> str:
    try:
        return restored(directory, "ddp", *LOCAL, "train.ema=0.9")[1][0].replace("the average of the parameters", "ema")
    except CheckpointError as error:
        assert "would begin here, where the copies of layout.local_sgd are apart: begin from a step that 3" in str(
            error
        )
        return "refused"


def count(layout: str, kind: str) -> Any:
    """Bytes that were really given to reductions between copies, by what is said, and by the code that does it."""
    config = config_of(layout, *BATCH, *SGD, *LOCAL, steps=STEPS, precision="float32")
    session = session_of(Tiny(kind=kind), config)
    group, counted = session.processes.mesh.group("dp_replicate"), [0]
    whole, original = session.processes.agreement, torch.distributed.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        used = kwargs.get("group", args[1] if len(args) > 1 else None)
        counted[0] += tensor.nbytes * (used is group and used is not whole)
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counting
    try:
        list(step_through(session, STEPS))
    finally:
        torch.distributed.all_reduce = original
    assert session.outer is not None
    said = next(str(decision) for decision in session.decisions if "layout.local_sgd" in decision.because)
    return counted[0], session.outer.sent_bytes, said


def test_what_travels_is_what_the_start_said(pool: Pools) -> None:
    numbers = (5 + 1) * 7 + 2 * (7 + 1) * 7 + (7 + 1) * 3
    for counted, sent, _ in pool(4).run(count, "dp_replicate=2,tp=2", "frozen"):
        assert counted == sent
    for counted, sent, said in pool(2).run(count, "ddp", "mlp"):
        assert counted == sent == 4 * numbers * STEPS // EVERY
        why = "(outer_lr=0.7, outer_momentum=0.9); DDP would send that in every step, and compute what one does"
        what = f"2 copies train by themselves: each process sends {4 * numbers} B every {EVERY} steps"
        assert said == f"{what}, because layout.local_sgd={EVERY} {why}"
