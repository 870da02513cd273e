"""One step of an own loop: what the user's calls have to be, and what is found out about them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks.data.random_keys import random_key, seed_all
from allranks.run import Run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS, Words
from tests.training.own.cases import Net, Samples, batches, built, count, everything, loss_of, refusal, sgd


def one_loop(folder: str, layout: str, lines: Callable[..., object], **cutting: Any) -> str:
    """A loop whose body is `lines(world, model, optimizer, batch)`; what it was refused with."""

    def loop() -> None:
        with allranks.join(layout=layout, precision="float64", run=folder) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            for batch in world.stream(Samples(), **{"global_batch": 10, "micro_batch": 2} | cutting):
                lines(world, model, optimizer, batch)

    return refusal(loop)


def good(world: Any, model: nn.Module, optimizer: Any, batch: Any) -> bool:
    world.backward(loss_of(model, batch), targets=count(batch))
    return bool(world.step(optimizer))


class Following(Net):
    """Remembers the mean of its samples, or how often it was called."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("code", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("code").add_(1.0 if self.counts else x.detach().mean(0))
        return super().forward(x)


@pytest.mark.distributed
@pytest.mark.parametrize("cut", [{"global_batch": 10}, {"global_batch": 3, "micro_batch": 1}])  # the second has fillers
def test_buffers_that_follow_the_samples_are_refused_over_several_ranks(
    pool: Pools, tmp_path: Path, cut: dict[str, Any]
) -> None:
    def case(folder: str, counts: bool) -> str:
        def loop() -> None:
            with allranks.join(layout="ddp", precision="float64", run=folder) as world:
                model = world.parallelize(Following(counts=counts))
                optimizer = world.optimizer(model, sgd)
                for batch in world.stream(Samples(12), **cut):
                    good(world, model, optimizer, batch)

        return refusal(loop)

    refused = "buffer code (1 in all) changes with the samples of a forward"
    found = pool(2).run(case, str(tmp_path / "follows"), False)
    assert all(refused in said for said in found), found
    assert pool(2).run(case, str(tmp_path / "counts"), True) == ["nothing was refused"] * 2


BAD: dict[str, tuple[Callable[..., object], str]] = {
    "no backward": (
        lambda world, model, optimizer, batch: None,
        "world.backward(loss, targets=) of this one never came",
    ),
    "no step": (
        lambda world, model, optimizer, batch: world.backward(loss_of(model, batch), targets=count(batch)),
        "world.step(optimizer) of the last one never came",
    ),
    "step first": (lambda world, model, optimizer, batch: world.step(optimizer), "came before world.backward"),
    "two backwards": (
        lambda world, model, optimizer, batch: [world.backward(loss_of(model, batch), targets=1) for _ in range(2)],
        "twice for one batch: add the losses",
    ),
    "two steps": (
        lambda world, model, optimizer, batch: [good(world, model, optimizer, batch), world.step(optimizer)],
        "world.step() was called twice in a step",
    ),
    "no number": (
        lambda world, model, optimizer, batch: world.backward(model(batch["x"]), targets=1),
        "world.backward(shape [2, 4, 5]): the loss has to be one number, the SUM",
    ),
    "a float": (lambda world, model, optimizer, batch: world.backward(0.5, targets=1), "world.backward(float)"),
    "no gradient": (
        lambda world, model, optimizer, batch: world.backward(loss_of(model, batch).detach(), targets=1),
        "the loss has no gradient",
    ),
    "targets": (
        lambda world, model, optimizer, batch: world.backward(loss_of(model, batch), targets=-1),
        "world.backward(targets=-1): the number of targets",
    ),
    "half a target": (
        lambda world, model, optimizer, batch: world.backward(loss_of(model, batch), targets=1.5),
        "world.backward(targets=1.5)",
    ),
    "a stranger": (
        lambda world, model, optimizer, batch: [
            world.backward(loss_of(model, batch), targets=1),
            world.step(sgd(list(model.parameters()))),
        ],
        "SGD is not an optimizer of this world: make it by world.optimizer(model, SGD, ...)",
    ),
    "no norm": (
        lambda world, model, optimizer, batch: world.step(optimizer, max_norm=0.0),
        "world.step(max_norm=0.0): expected a norm above 0",
    ),
    "zero_grad": (
        lambda world, model, optimizer, batch: [optimizer.zero_grad(), good(world, model, optimizer, batch)],
        "leave out optimizer.zero_grad(), world.step does it",
    ),
    "no resume": (
        lambda world, model, optimizer, batch: world.save(every=2),
        "TaskError: world.save() before world.resume(model, optimizer, stream)",
    ),
}


def test_every_wrong_line_is_refused_in_words(pool: Pools, tmp_path: Path) -> None:
    def case() -> dict[str, str]:
        return {
            name: one_loop(str(tmp_path / name.replace(" ", "-")), "single", lines) for name, (lines, _) in BAD.items()
        }

    (found,) = pool(1).run(case, timeout=240)
    for name, (_, text) in BAD.items():
        assert text in found[name], name
        assert "\n" not in found[name]


@pytest.mark.parametrize("layout", ["ddp", "dp_shard=2"])
def test_gradients_that_are_dropped_before_the_step_make_no_step(pool: Pools, layout: str, tmp_path: Path) -> None:
    """It updated nothing and said that it had."""

    def case(folder: str) -> str:
        with allranks.join(layout, precision="float64", run=folder) as world:
            model = world.parallelize(built(7))
            optimizer = world.optimizer(model, sgd)
            for batch in world.stream(Samples(), global_batch=10, steps=1):
                world.backward(loss_of(model, batch), targets=count(batch))
                kept = {parameter: parameter.grad for parameter in model.parameters()}
                optimizer.zero_grad()
                found = refusal(lambda: world.step(optimizer))
                for parameter, gradient in kept.items():
                    parameter.grad = gradient
                assert not found or world.step(optimizer)
                return found
        return "no batch"

    said = pool(2).run(case, str(tmp_path))
    assert all("leave out optimizer.zero_grad(), world.step does it" in one for one in said)


def test_a_call_outside_of_the_loop(pool: Pools) -> None:
    def case() -> list[str]:
        with allranks.join(precision="float64") as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            loss = loss_of(
                model, {"x": torch.zeros(1, 6, dtype=torch.float64), "y": torch.zeros(1, 4, dtype=torch.long)}
            )
            before = [refusal(lambda: world.step(optimizer)), refusal(world.save), refusal(lambda: world.log(a=1))]
            stream = world.stream(Samples(), global_batch=10)
            after = [refusal(lambda: world.backward(loss, targets=4)), refusal(lambda: world.step(optimizer))]
            return [*before, *after, refusal(lambda: world.resume(model, sgd(list(model.parameters())), stream))]

    (found,) = pool(1).run(case)
    assert found == [
        "TaskError: world.step() before world.stream(...): it belongs into the loop over a stream",
        "TaskError: world.save() before world.stream(...): it belongs into the loop over a stream",
        "TaskError: world.log() before world.stream(...): it belongs into the loop over a stream",
        "TaskError: world.backward() outside of the loop: it belongs to a batch of `for batch in world.stream(...)`",
        "TaskError: world.step() outside of the loop: it belongs to a batch of `for batch in world.stream(...)`",
        "TaskError: SGD is not an optimizer of this world: make it by world.optimizer(model, SGD, ...)",
    ]


def test_generators_are_seeded_by_where_the_batch_stands(pool: Pools, tmp_path: Path) -> None:
    def case() -> list[float]:
        drawn: list[float] = []

        def lines(world: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
            drawn.append(float(torch.rand(())))
            torch.rand(len(drawn))  # what the user's code draws moves nothing that comes later
            good(world, model, optimizer, batch)

        assert one_loop(str(tmp_path / "run"), "ddp", lines, seed=5, steps=2).startswith("nothing")
        return drawn

    def expected(rank: int) -> Iterator[float]:
        for step in range(2):
            for micro_step in range(3):
                seed_all(random_key(5, step, micro_step, rank))
                yield float(torch.rand(()))

    assert pool(2).run(case) == [list(expected(0)), list(expected(1))]


def test_a_filler_counts_nothing(pool: Pools, tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)
            self.forwards: torch.Tensor
            self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.forwards += 1
            output: torch.Tensor = self.linear(x)
            return output

    def case() -> tuple[list[int], list[int], int]:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model = world.parallelize(Counting())
            optimizer = world.optimizer(model, sgd)
            weights, rows = [], []
            for batch in world.stream(Samples(), global_batch=4, micro_batch=1, steps=2):
                weights.append(world.weight)
                everyone = world.gather(batch["x"])
                rows.append(len(everyone))
                world.backward(model(batch["x"]).sum(), targets=1)
                world.step(optimizer)
            return weights, rows, int(model.get_buffer("module.forwards"))

    found = pool(3).run(case)
    # 4 samples in 2 micro-steps of 2, over 3 ranks: each micro-step leaves one rank without.
    assert [sum(weights[at] for weights, _, _ in found) for at in range(4)] == [2] * 4
    # A filler brings no row to the others, and has its own behind theirs.
    assert all(rows == [3 - weight for weight in weights] for weights, rows, _ in found)
    assert [forwards for _, _, forwards in found] == [sum(weights) for weights, _, _ in found]
    assert sum(forwards for _, _, forwards in found) == 8


def power(model: nn.Module, batch: Any) -> torch.Tensor:
    """A sum over samples."""
    return torch.tanh(model(batch["x"])).pow(3).sum()


def with_statistics(folder: str, layout: str, cutting: Any) -> Any:
    """In a worker: an evaluation before each update and the model at the end, and the fillers that it ran."""
    measured, fillers = [], 0
    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        seed_all(3)
        norms = nn.BatchNorm1d(5), nn.BatchNorm1d(5, track_running_stats=False)
        built = nn.Sequential(nn.Linear(6, 10), nn.Unflatten(1, (5, 2)), norms[0], nn.Tanh(), norms[1])
        model = world.parallelize(built)
        optimizer = world.optimizer(model, sgd)
        for batch in world.stream(Samples(), global_batch=5, steps=2, **cutting):
            fillers += 1 - world.weight
            measured.append(world.evaluate(Samples(10), lambda b: {"m": (power(model, b), len(b["x"]))}, batch=4)["m"])
            world.backward(power(model, batch), targets=len(batch["x"]))
            world.step(optimizer)
        return measured, everything(world), fillers


def test_batch_statistics_are_those_of_one_device(pool: Pools, tmp_path: Path) -> None:
    ((alone, values, _),) = pool(1).run(with_statistics, str(tmp_path / "one"), "single", {"micro_steps": 3})
    for layout in ("ddp", "fsdp"):
        ranks = pool(3).run(with_statistics, str(tmp_path / layout), layout, {"micro_steps": 3})
        assert sum(fillers for _, _, fillers in ranks) > 0
        for measured, found, _ in ranks:
            torch.testing.assert_close(measured, alone, rtol=1e-12, atol=1e-14)
            for name in values if layout == "ddp" else ():
                torch.testing.assert_close(found[name], values[name], rtol=1e-11, atol=1e-13)


def left(folder: str, layout: str, where: str) -> dict[str, torch.Tensor]:
    """In a worker: three steps of three micro-batches, of which the first and the last are left once `where` it says.

    The one between them is not finite.
    """
    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        seed_all(3)
        built = nn.Sequential(nn.Linear(6, 10), nn.Unflatten(1, (5, 2)), nn.BatchNorm1d(5), nn.Tanh(), nn.Flatten())
        model = world.parallelize(nn.Sequential(built, nn.Linear(10, 3)))
        optimizer = world.optimizer(model, sgd)
        stream = world.stream(Samples(), global_batch=5, micro_steps=3, steps=3)  # a rank fills up the third
        waiting = {0, 2} if where else set()
        while stream.step < 3:
            for index, batch in enumerate(stream):
                leaves = stream.step in waiting and index == (1 if where in ("batch", "backward") else 2)
                if leaves and where == "batch":
                    break
                loss = power(model, batch) * (float("inf") if stream.step == 1 else 1.0)
                if leaves and where == "forward":
                    break
                world.backward(loss, targets=len(batch["x"]))
                if leaves:
                    break
                world.step(optimizer)
            waiting.discard(stream.step)
        return everything(world)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "size", "places"),
    [
        ("ddp", 2, ("batch", "forward", "backward", "step")),
        ("dp_replicate=2,batchnorm=local", 2, ("forward",)),
        ("dp_shard=2", 2, ("backward",)),
        ("dp_shard=2,sharding=grad_op", 2, ("forward", "step")),
        ("dp_replicate=2,sharding=none", 2, ("backward", "step")),
        ("dp_replicate=2,dp_shard=2", 4, ("backward",)),
        ("dp_replicate=2,dp_shard=2,sharding=grad_op", 4, ("backward",)),
    ],
)
def test_a_step_that_was_left_leaves_nothing(
    pool: Pools, tmp_path: Path, layout: str, size: int, places: tuple[str, ...]
) -> None:
    """Neither gradients that wait for their reduction, nor running statistics; nor does the first step's guard."""
    expected = pool(size).run(left, str(tmp_path / "whole"), layout, "")
    for where in places:
        for found, whole in zip(pool(size).run(left, str(tmp_path / where), layout, where), expected, strict=True):
            assert found.keys() == whole.keys()
            for name, value in whole.items():
                assert torch.equal(found[name], value), (where, name)


def beside(folder: str, where: str, steps: int = 3) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """In a worker: the buffers of a frozen module that counts on, before and after steps of which the second is not
    finite, and the one that `where` tells is left once in its middle."""
    with allranks.join(precision="float64", run=folder) as world:
        seed_all(3)
        model = world.parallelize(nn.Linear(6, 3))
        frozen = world.parallelize(nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()).requires_grad_(False))
        optimizer, spread = world.optimizer(model, sgd), world._ground.models.all()[1]
        names = [name for name, entry in spread.map.items() if entry.kind == "buffer"]
        stream = world.stream(Samples(), global_batch=6, micro_steps=3, steps=steps)
        found, waiting = [], {"first": 0, "last": 2}.get(where)
        while stream.step < steps:
            for index, batch in enumerate(stream):
                loss = model(frozen(batch["x"])).square().sum() * (float("inf") if stream.step == 1 else 1.0)
                world.backward(loss, targets=len(batch["x"]))
                if stream.step == waiting and index == 1:
                    waiting = None
                    break
                if world.step(optimizer):
                    found.append({name: spread.local(name).clone() for name in names})
        return found[0], found[1] if where == "skipped" else found[-1]


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_frozen_module_counts_nothing_of_a_step_that_was_left(pool: Pools, tmp_path: Path, where: str) -> None:
    ((_, whole),) = pool(1).run(beside, str(tmp_path / "whole"), "")
    ((_, found),) = pool(1).run(beside, str(tmp_path / "left"), where)
    assert whole["0.num_batches_tracked"] == 6, "three micro-batches in each of two steps"
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_frozen_module_counts_nothing_of_a_step_that_was_skipped(pool: Pools, tmp_path: Path) -> None:
    ((before, after),) = pool(1).run(beside, str(tmp_path / "run"), "skipped", 2)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_cut_that_depends_on_the_number_of_ranks_is_refused(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        return refusal(lambda: with_statistics(str(tmp_path / "run"), "single", {"micro_batch": 2}))

    assert pool(1).run(case) == [
        "ConfigError: world.stream(micro_batch=2): BatchNorm looks at which samples share a forward, so the number of "
        "forwards has to be fixed: give micro_steps instead"
    ]


def test_a_forward_of_the_users_between_backward_and_step_leaves_nothing_stale(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, look: bool) -> None:
        def lines(world: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
            world.backward(loss_of(model, batch), targets=count(batch))
            if look:
                with torch.no_grad():
                    model(batch["x"])
            world.step(optimizer)

        torch.manual_seed(1)
        assert one_loop(folder, "dp_shard=2", lines).startswith("nothing")

    losses = []
    for look in (False, True):
        pool(2).run(case, str(tmp_path / str(look)), look)
        losses.append([line["loss"] for line in Run.open(tmp_path / str(look)).steps()])
    assert losses[0] == losses[1]


def own_experts(folder: str, layout: str, leaves: bool = False) -> list[torch.Tensor]:
    """Three steps over words, the second of which may be left once, and where the routers' biases then stand."""
    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        torch.manual_seed(0)
        model = world.parallelize(MODELS["moe"]())
        optimizer = world.optimizer(model, sgd)
        stream = world.stream(Words(), global_batch=5, micro_steps=3, steps=3)
        while stream.step < 3:
            for batch in stream:
                output = model(batch["x"]).flatten(0, 1)
                loss = nn.functional.cross_entropy(output, batch["y"].flatten(), reduction="sum")
                world.backward(loss, targets=count(batch))
                if leaves and stream.step == 1:
                    leaves = False
                    break
                world.step(optimizer)
        spread = world._ground.models.trained
        return [spread.local(name).clone() for name in spread.map if name.endswith(("router.bias", "norm.weight"))]


def test_experts_balance_in_a_loop_of_ones_own(pool: Pools, tmp_path: Path) -> None:
    (alone,) = pool(1).run(own_experts, str(tmp_path / "alone"), "single")
    assert len(alone) == 7 and all(alone[index].abs().max() > 0 for index in range(7))
    for layout in ("dp_replicate=2,ep=2", "dp_shard=2,ep=2,sharding=grad_op"):
        for found in pool(2).run(own_experts, str(tmp_path / layout), layout):
            for value, expected in zip(found, alone, strict=True):
                if value.shape == expected.shape:
                    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    (found,) = pool(1).run(own_experts, str(tmp_path / "left"), "single", True)
    assert all(map(torch.equal, found, alone)), "tokens of a step that was left count"


def averaged(folder: str, layout: str, stop: int = 6) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Steps up to `stop` with an average: what a rank holds of it, and an evaluation with it and without."""

    def measure(model: nn.Module) -> Callable[[Any], dict[str, tuple[Any, Any]]]:
        return lambda batch: {"loss": (loss_of(model, batch), count(batch))}

    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        model = world.parallelize(built(7))
        optimizer = world.optimizer(model, sgd)
        average = world.ema(model, decay=0.75)
        stream = world.stream(Samples(), global_batch=10, steps=stop, seed=3)
        world.resume(model, optimizer, stream)
        for batch in stream:
            good(world, model, optimizer, batch)
        with average.in_place():
            found = [world.evaluate(Samples(), measure(model), batch=10)["loss"]]
        found.append(world.evaluate(Samples(), measure(model), batch=10)["loss"])
        return {entry.name: part.clone() for entry, part in average.parts()}, found


def test_an_average_follows_the_steps_and_goes_on_after_a_resume(pool: Pools, tmp_path: Path) -> None:
    ((expected, measured),) = pool(1).run(averaged, str(tmp_path / "one"), "single")
    assert measured[0] != measured[1]
    first, *_ = batches(global_batch=10, steps=6)
    model = built(7).double()
    values = [parameter.detach().clone() for parameter in model.parameters()]

    def finish(trained: nn.Module) -> None:
        for value, parameter in zip(values, trained.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.25)

    plain_loop(model, sgd, [(batch, count(batch)) for batch in first], loss_of, finish=finish)
    named = {f"ema.{name}": value for (name, _), value in zip(model.named_parameters(), values, strict=True)}
    assert all(torch.allclose(expected[name], value, rtol=1e-11, atol=1e-14) for name, value in named.items())
    for found, numbers in pool(2).run(averaged, str(tmp_path / "two"), "ddp"):
        assert all(torch.allclose(found[name], value, rtol=1e-11, atol=1e-14) for name, value in expected.items())
        assert all(abs(a - b) <= 1e-11 * abs(b) for a, b in zip(numbers, measured, strict=True))
    pool(1).run(averaged, str(tmp_path / "parts"), "single", 3)
    ((resumed, _),) = pool(1).run(averaged, str(tmp_path / "parts"), "single")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


def test_nothing_is_saved_or_trained_of_a_model_that_has_the_averages(tmp_path: Path) -> None:
    """A checkpoint had parameters and averages exchanged."""
    found = []
    with allranks.join(precision="float64", run=tmp_path / "run") as world:
        model = world.parallelize(built(7))
        optimizer = world.optimizer(model, sgd)
        average = world.ema(model, decay=0.5)
        stream = world.stream(Samples(), global_batch=10, steps=1)
        world.resume(model, optimizer, stream)
        for batch in stream:
            good(world, model, optimizer, batch)
            with average.in_place():
                found = [refusal(world.save), refusal(lambda: average.in_place().__enter__())]
                found.append(refusal(average.update))
    assert [one.partition(", and is not ")[2] for one in found] == [
        f"{what}: leave it first" for what in ("saved", "averaged again", "trained")
    ]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000001"]


def test_an_average_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with allranks.join(run=tmp_path / "run") as world:
        model = world.parallelize(Net())
        assert refusal(lambda: world.ema(model, 1.0)) == (
            "ConfigError: world.ema(decay=1.0): expected a number between 0 and 1, such as 0.999"
        )
        assert "not the model of this world" in refusal(lambda: world.ema(Net(), 0.9))
        world.ema(model, 0.9)
        assert "was called already" in refusal(lambda: world.ema(model, 0.9))


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []

    def lines(world: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
        loss = loss_of(model, batch) * (float("inf") if len(seen) == 2 else 1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        world.backward(loss, targets=count(batch))
        stepped = bool(world.step(optimizer))
        now = [parameter.detach() for parameter in model.parameters()]
        same = all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
        seen.append((stepped, same and all(bool(one.isfinite().all()) for one in now)))

    assert one_loop(str(tmp_path / "run"), "single", lines, micro_batch=10, epochs=1) == "nothing was refused"
    assert seen[2] == (True, True) and seen[1] == seen[3] == (True, False)
    skipped = [event["step"] for event in Run.open(tmp_path / "run").steps() if "skipped" in event]
    assert skipped == [3]
