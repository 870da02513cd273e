"""Replicas that send each other less, in a loop of one's own: the laws that hold a Task's run (law 4's exceptions)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import allranks
from allranks.data.cut import Cut
from allranks.data.stream import DataStream
from allranks.run import Run
from allranks.training.door import World
from allranks.verifying.parity import RecordedStep, compare
from allranks.verifying.reference import ReferenceStep
from allranks.verifying.reference_replicas import Gradients, Reduce, local_loop, low_rank, mean, reduced_loop, rounded
from tests.distributed.pool import Pools
from tests.training.own import cases
from tests.training.own.cases import Crash, Samples, built, count, loss_of, own_loop, refusal, sgd, with_journal

pytestmark = pytest.mark.distributed

BATCH = 9
CUT: dict[str, Any] = {
    "global_batch": BATCH,
    "micro_batch": 2,
}  # 37 samples: five steps, the last of one sample; 2 ranks: M = 3
EVERY = 2
POWERSGD = {"ddp_hook": "powersgd", "powersgd_rank": 1, "powersgd_start": 1}


def shares(num_ranks: int) -> list[tuple[list[Any], int]]:
    """Of every step each rank's batch (None: it has none), and the targets of all."""
    dataset, found = Samples(), []
    orders = [DataStream(dataset, cut=Cut(BATCH, num_ranks, 2), dp_rank=r, seed=3, epochs=1) for r in range(num_ranks)]
    for steps in zip(*(order.steps() for order in orders), strict=True):
        fed = [[int(i) for plan in step.micro_plans if len(plan.positions) for i in plan.samples] for step in steps]
        batches = [default_collate([dataset[i] for i in samples]) if samples else None for samples in fed]
        found.append((batches, sum(count(batch) for batch in batches if batch is not None)))
    return found


def divided_after(reduce: Reduce, targets: Sequence[int]) -> Reduce:
    """The ranks reduce the gradients of their sums, which are divided then: what rounding alone may do."""

    def found(step: int, ranks: Sequence[Gradients]) -> Gradients:
        sums = [{name: gradient * targets[step] for name, gradient in rank.items()} for rank in ranks]
        return {name: gradient / targets[step] for name, gradient in reduce(step, sums).items()}

    return found


def hooked(num_ranks: int, make: Callable[[], Reduce], *, after: bool) -> list[ReferenceStep]:
    steps = shares(num_ranks)
    reduce = divided_after(make(), [targets for _, targets in steps]) if after else make()
    return reduced_loop(built(7).double(), sgd, steps, loss_of, reduce)


def run_hooked(folder: str, layout: str, keys: dict[str, Any]) -> list[RecordedStep]:
    return own_loop(folder, layout, join=keys, **CUT)


# hook -> (join's keys, what it computes, whether the targets are divided by afterwards)
HOOKS: dict[str, tuple[dict[str, Any], Callable[[], Reduce], bool]] = {
    "bfloat16": ({"ddp_hook": "bfloat16"}, lambda: rounded(torch.bfloat16), True),
    "float16": ({"ddp_hook": "float16"}, lambda: rounded(torch.float16), True),
    "powersgd": (POWERSGD, lambda: low_rank(1, start=1), False),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_what_its_simulation_computes(pool: Pools, tmp_path: Path, hook: str) -> None:
    keys, make, after = HOOKS[hook]
    folder = tmp_path / "run"
    ranks = [with_journal(rank, folder) for rank in pool(2).run(run_hooked, str(folder), "ddp", keys)]
    differences = compare(ranks, hooked(2, make, after=after))
    assert not differences, "; ".join(map(str, differences[:5]))
    assert compare(ranks, hooked(2, lambda: mean, after=False)), "the test could not tell it from the exact mean"
    said = [event["because"] for event in Run.open(folder).events() if event["event"] == "decision"]
    assert any(f"layout.ddp_hook={hook}" in because for because in said)


@pytest.mark.full
def test_powersgd_does_not_depend_on_the_number_of_ranks(pool: Pools, tmp_path: Path) -> None:
    """The last step has one sample: three of its ranks run fillers. DDP's buckets are settled first."""
    ranks = [with_journal(rank, tmp_path) for rank in pool(4).run(run_hooked, str(tmp_path), "ddp", POWERSGD)]
    differences = compare(ranks, hooked(4, lambda: low_rank(1, start=1), after=False))
    assert not differences, "; ".join(map(str, differences[:5]))


LOCAL: dict[str, tuple[str, int, list[list[int]]]] = {
    "single": ("ddp", 2, [[0], [1]]),
    "three": ("ddp", 3, [[0], [1], [2]]),
    "shard": ("dp_replicate=2,dp_shard=2", 4, [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize(
    "case", ["single", *(pytest.param(case, marks=pytest.mark.full) for case in ("three", "shard"))]
)
def test_copies_are_what_a_loop_over_copies_computes(pool: Pools, tmp_path: Path, case: str) -> None:
    layout, size, copies = LOCAL[case]
    ranks = pool(size).run(run_hooked, str(tmp_path), layout, {"local_sgd": EVERY})
    found = [with_journal(rank, tmp_path) for rank in ranks]
    expected = simulated(size, copies)
    for number, (members, reference) in enumerate(zip(copies, expected, strict=True)):
        differences = compare([found[rank] for rank in members], reference)
        # The journal tells of the first copy's norm.
        differences = [one for one in differences if number == 0 or "norm" not in one.what]
        assert not differences, "; ".join(map(str, differences[:5]))
    apart, one = (step_of(expected, at) for at in (EVERY, -1))
    assert any(not torch.equal(apart[0][name], apart[1][name]) for name in apart[0]), "the copies are never apart"
    assert all(torch.equal(one[0][name], one[1][name]) for name in one[0]), "the short last round is put together"


def step_of(expected: list[list[ReferenceStep]], at: int) -> list[Gradients]:
    return [steps[at].parameters for steps in expected]


def simulated(num_ranks: int, copies: list[list[int]]) -> list[list[ReferenceStep]]:
    """Of the last round, which is shorter, the copies are put together too."""
    steps = []
    for batches, targets in shares(num_ranks):
        fed = [[batches[rank] for rank in members if batches[rank] is not None] for members in copies]
        steps.append(([merged(some) for some in fed], targets))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) if len(batch["x"]) else 0 * loss_of(model, filler())

    def outer(parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)

    return local_loop(built(7).double(), sgd, steps, loss, outer, EVERY, last=len(steps))


def filler() -> Any:
    return default_collate([Samples()[0]])


def merged(batches: list[Any]) -> Any:
    if not batches:
        return {name: value[:0] for name, value in filler().items()}
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def interrupted(folder: str, keys: dict[str, Any], crash_after: int | None = None) -> dict[str, torch.Tensor] | None:
    """This rank's tensors at the end of seven steps, saved after every third; None after a crash."""
    try:
        with allranks.join(layout="ddp", precision="float64", run=folder, **keys) as world:
            model = world.parallelize(built(7))
            optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
            stream = world.stream(Samples(), steps=8, **CUT)
            world.resume(model, optimizer, stream)
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer, max_norm=1.0)
                world.save(every=3)
                if stream.step == crash_after:
                    raise Crash
            return cases.everything(world) | dict(kept(world))
    except Crash:
        return None


def kept(world: World) -> Iterator[tuple[str, torch.Tensor]]:
    """What a hook or an outer optimizer keeps."""
    spread, outer = world._ground.models.trained, world._step.links.outer
    for entry, part in [] if spread.hook is None else spread.hook.parts(spread.map):
        yield entry.name, part.clone()
    for entry, part in [] if outer is None else outer.parts([], []):
        yield entry.name, part.clone()


@pytest.mark.parametrize("keys", [POWERSGD, {"local_sgd": EVERY}], ids=["powersgd", "local_sgd"])
def test_a_resumed_loop_is_bitwise_the_uninterrupted_one(pool: Pools, tmp_path: Path, keys: dict[str, Any]) -> None:
    """What was saved at step 3 lies between two meetings of the copies."""
    whole = pool(2).run(interrupted, str(tmp_path / "whole"), keys)
    assert pool(2).run(interrupted, str(tmp_path / "broken"), keys, 4) == [None] * 2
    again = pool(2).run(interrupted, str(tmp_path / "broken"), keys)
    assert [event["step"] for event in Run.open(tmp_path / "broken").events() if event["event"] == "resume"] == [3]
    for before, after in zip(whole, again, strict=True):
        assert before is not None and after is not None and before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert any("powersgd_error" in name or "outer_momentum" in name for name in before)


def left(folder: str, where: str) -> dict[str, torch.Tensor]:
    """In a worker: what four steps of three micro-batches leave, the third of which is left once `where` it says.

    After its last backward: what there is when it is begun anew.
    """
    keys: dict[str, Any] = POWERSGD
    with allranks.join(layout="ddp", precision="float64", run=folder, **keys) as world:
        model = world.parallelize(built(7))
        optimizer = world.optimizer(model, sgd)
        stream = world.stream(Samples(), steps=4, **CUT)
        waits = bool(where)
        while stream.step < 4:
            for index, batch in enumerate(stream):
                if where == "last" and not waits:
                    return cases.everything(world) | dict(kept(world))
                leaves = waits and stream.step == 2 and index == (6 if where == "first" else 8)
                waits &= not leaves
                loss = loss_of(model, batch)
                if leaves and where == "forward":
                    break
                world.backward(loss, targets=count(batch))
                if leaves:
                    break
                world.step(optimizer)
        return cases.everything(world) | dict(kept(world))


def errors(found: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value for name, value in found.items() if "powersgd_error" in name]


def test_what_powersgd_has_not_sent_outlives_a_step_that_was_left(pool: Pools, tmp_path: Path) -> None:
    """Unless the hook has taken its gradients in: they are of no step."""
    whole = pool(2).run(left, str(tmp_path / "whole"), "")
    for where in ("first", "forward"):
        for before, after in zip(whole, pool(2).run(left, str(tmp_path / where), where), strict=True):
            assert any(value.abs().max() > 0 for value in errors(before))
            assert [name for name in before if not torch.equal(before[name], after[name])] == [], where
    for found in pool(2).run(left, str(tmp_path / "last"), "last"):
        assert errors(found) and all(value.abs().max() == 0 for value in errors(found))


def looped(folder: str, layout: str, keys: dict[str, Any], lines: Callable[..., object], **cutting: Any) -> str:
    """What a loop is refused with, or the values that an evaluation at its end sees, rank by rank the same."""

    def loop() -> None:
        with allranks.join(layout=layout, precision="float64", run=folder, **keys) as world:
            model = world.parallelize(built(7))
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Samples(), **(CUT | cutting))
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
                lines(world, model, batch)
            evaluated(world, model)

    return refusal(loop)


def evaluated(world: World, model: Any) -> dict[str, float]:
    return world.evaluate(Samples(5), lambda batch: {"loss": (loss_of(model, batch), count(batch))}, batch=5)


WRONG: dict[str, tuple[str, dict[str, Any], Callable[..., object], dict[str, Any], str]] = {
    "no replicas": (
        "fsdp",
        {"ddp_hook": "bfloat16"},
        lambda *_: None,
        {},
        "LayoutError: layout.ddp_hook=bfloat16 changes what DDP sends, and dp_shard=2 has no DDP",
    ),
    "no copies": (
        "tp=2",
        {"local_sgd": 2},
        lambda *_: None,
        {},
        "LayoutError: layout.local_sgd=2 puts the copies of dp_replicate together, and tp=2 has one",
    ),
    "steps": (
        "ddp",
        {"local_sgd": 2},
        lambda *_: None,
        {"steps": 3},
        "LayoutError: world.stream(steps=3): the loop ends where the copies of layout.local_sgd=2 are one, every 2 "
        "steps: 2 or 4 fits",
    ),
    "evaluation": (
        "ddp",
        {"local_sgd": 2},
        lambda world, model, _: evaluated(world, model),
        {},
        "TaskError: world.evaluate(): the copies of layout.local_sgd=2 are apart; they are one after every 2 steps, "
        "and at the end of the stream",
    ),
    "gather": (
        "ddp",
        {"local_sgd": 2},
        lambda world, _, batch: world.gather(batch["x"]),
        {},
        "LayoutError: world.gather(): layout.local_sgd=2 lets the copies of a model train by themselves in between",
    ),
    "ema": (
        "ddp",
        {"local_sgd": 2},
        lambda world, model, _: world.ema(model, 0.5),
        {},
        "LayoutError: world.ema(): layout.local_sgd=2 lets the copies",
    ),
    "a typo": (
        "ddp",
        {"local_sdg": 2},
        lambda *_: None,
        {},
        "ConfigError: join(local_sdg=...): no such argument; did you mean 'local_sgd'?",
    ),
    "no key": (
        "ddp",
        {"zzz": 2},
        lambda *_: None,
        {},
        "ConfigError: join(zzz=...): no such argument; there are gather, prefetch, ddp_hook",
    ),
    "a value": ("ddp", {"ddp_hook": "int8"}, lambda *_: None, {}, "ConfigError: argument 'layout.ddp_hook=int8'"),
    "nothing": ("ddp", {"local_sgd": 2}, lambda *_: None, {}, "nothing was refused"),
}


def test_what_cannot_be_is_refused_in_words(pool: Pools, tmp_path: Path) -> None:
    def case() -> dict[str, str]:
        return {
            name: looped(str(tmp_path / name.replace(" ", "-")), layout, keys, lines, **cutting)
            for name, (layout, keys, lines, cutting, _) in WRONG.items()
        }

    for found in pool(2).run(case, timeout=240):
        for name, (*_, text) in WRONG.items():
            assert found[name].startswith(text) and "\n" not in found[name], (name, found[name])


def test_values_that_were_loaded_after_spreading_are_where_the_copies_begin(pool: Pools, tmp_path: Path) -> None:
    """The first outer step goes from there, not from what `parallelize` was given."""

    def case() -> bool:
        with allranks.join(layout="ddp", precision="float64", run=str(tmp_path), local_sgd=1, outer_lr=1e-9) as world:
            model = world.parallelize(built(7))
            optimizer = world.optimizer(model, sgd)
            with torch.no_grad():
                loaded = [parameter.mul_(1.5).clone() for parameter in model.parameters()]
            for batch in world.stream(Samples(), steps=1, **CUT):
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
            return all(bool((p - v).abs().max() < 1e-6) for p, v in zip(model.parameters(), loaded, strict=True))

    assert pool(2).run(case) == [True, True]
