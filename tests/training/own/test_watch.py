"""Sentinels of a loop of one's own: a right loop hears nothing, a wrong one is told its mistake, in the journal too."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from torch import nn
from torch.utils.data import IterableDataset

import allranks
from allranks.run import Run
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, loss_of, own_loop, refusal, resumable, sgd
from tests.training.own.runs import folder_of, run_loop

pytestmark = pytest.mark.distributed

EVERY: dict[str, Any] = {"digest_every": 1, "on_finding": "stop"}
Spoil = Callable[[Any, Any, int], object]


class Tracking(Net):
    """Keeps a mean of what its own rank has seen, which nobody puts together."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(), 0.5)
        return super().forward(x)


class Alike(IterableDataset[Any]):
    """Shards itself, and gives each rank the same part."""

    order = "sharded"

    def __iter__(self) -> Any:
        dataset = Samples()
        return (dataset[index] for index in range(20))


def spoilt(
    folder: str,
    layout: str,
    spoil: Spoil,
    *,
    make: Callable[[], nn.Module] = Net,
    dataset: Callable[[], Any] = Samples,
    **keys: Any,
) -> str:
    """A loop in which `spoil(world, model, step)` comes before every forward; what it was refused with."""

    def loop() -> None:
        with allranks.join(layout=layout, precision="float64", run=folder, **keys) as world:
            torch.manual_seed(3)
            model = world.parallelize(make())
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(dataset(), global_batch=8, epochs=None, steps=5)
            world.resume(model, optimizer, stream)
            for batch in stream:
                spoil(world, model, stream.step)
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
                world.save()

    return refusal(loop)


def flip(world: Any, model: Any, step: int) -> None:
    """What a bit that flips on rank 1 leaves behind in the third step."""
    if step == 2 and world.rank == 1:
        name = next(iter(world._ground.models.trained.trainable()))
        world._ground.models.trained.local(name).view(-1)[0] += 1.0


def reseed(world: Any, model: Any, step: int) -> None:
    torch.manual_seed(5)


def nothing(world: Any, model: Any, step: int) -> None:
    """Right."""


WRONG: dict[str, tuple[Spoil, dict[str, Any], str, str, bool]] = {
    "a flipped bit": (flip, {}, "replicas_differ", "after step 3 rank 0", True),
    "a seed": (reseed, {}, "reseeded", "model or loss seeds torch's generator (cpu) anew, with 5", False),
    "the same samples": (nothing, {"dataset": Alike}, "fed_alike", "ranks 0 and 1 are fed the same samples", False),
}


def verdicts(folder: Path) -> list[dict[str, Any]]:
    return [event for event in Run.open(folder).events(0) if event["event"] == "verdict"]


def test_a_mean_of_its_own_samples_is_refused_in_the_first_step(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        return spoilt(str(tmp_path / "run"), "ddp", nothing, digest_every=1, make=Tracking)

    assert all("buffer mean" in refusal for refusal in pool(2).run(case))


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named(pool: Pools, tmp_path: Path, name: str) -> None:
    spoil, more, kind, what, ends = WRONG[name]
    folder = tmp_path / "run"

    def case() -> str:
        return spoilt(str(folder), "ddp", spoil, digest_every=1, **more)

    refusals = pool(2).run(case)
    (verdict,) = verdicts(folder)
    assert verdict["kind"] == kind and what in verdict["what"], verdict
    saved = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    if ends:
        assert all(told.startswith("GuardError: ") and what in told for told in refusals), refusals
        assert verdict["step"] not in saved, "what is not alike is not saved"
    else:
        assert refusals == ["nothing was refused"] * 2
        assert verdict["what"].endswith("the run goes on") and saved[-1] == 5


def test_copies_are_compared_before_each_save(pool: Pools, tmp_path: Path) -> None:
    """The bit flips between two rounds."""
    for told in pool(2).run(spoilt, str(tmp_path), "ddp", flip):
        assert told.startswith("GuardError: after step 3 rank 0") and "resume from a checkpoint of step 2" in told
    assert max(saved(tmp_path)) == 2


def replace_layer(world: Any, model: Any, step: int) -> None:
    if step == 2:
        model.heads[0] = nn.Linear(8, 5, dtype=torch.float64)


def test_a_layer_that_is_made_anew_is_told_of_on_one_process_too(tmp_path: Path) -> None:
    assert spoilt(str(tmp_path / "warned"), "single", replace_layer, digest_every=2) == "nothing was refused"
    (verdict,) = verdicts(tmp_path / "warned")
    assert (verdict["kind"], verdict["step"]) == ("optimizer_unlinked", 4)
    told = spoilt(str(tmp_path / "stopped"), "single", replace_layer, digest_every=2, on_finding="stop")
    assert told.startswith("GuardError: step 4: optimizers and model have parted on rank 0")


def replaced_before_the_loop(folder: str) -> str:
    def loop() -> None:
        with allranks.join(layout="single", precision="float64", run=folder, on_finding="stop") as world:
            model: Any = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            model.heads[0] = nn.Linear(8, 5, dtype=torch.float64)
            for batch in world.stream(Samples(), global_batch=8):
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)

    return refusal(loop)


def test_what_is_replaced_between_optimizer_and_loop_is_seen_after_the_first_step(tmp_path: Path) -> None:
    told = replaced_before_the_loop(str(tmp_path / "run"))
    assert told.startswith("GuardError: step 1: ") and "heads.0.weight" in told


def test_the_first_step_is_looked_at_then_every_200th_and_the_last(tmp_path: Path) -> None:
    assert spoilt(str(tmp_path / "run"), "single", replace_layer) == "nothing was refused"
    (verdict,) = verdicts(tmp_path / "run")
    assert (verdict["kind"], verdict["step"]) == ("optimizer_unlinked", 5)
    assert 'mute="linkage" silences this sentinel' in verdict["next"]


def test_what_a_rank_notices_alone_is_told_where_nothing_is_compared(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"mute": ["linkage", "samples"], "digest_every": 2}
    assert spoilt(str(tmp_path / "run"), "single", reseed, **keys) == "nothing was refused"
    assert [one["kind"] for one in verdicts(tmp_path / "run")] == ["reseeded"]


def saving(
    folder: str,
    meddle: Callable[..., Any] = lambda *_: None,
    layout: str = "single",
    catch: type[Exception] = ZeroDivisionError,
    **keys: Any,
) -> str:
    """A loop with an average that saves after its steps 2 and 4; `meddle(world, model, patch)` comes before it.

    What a save raises is passed over where it is a `catch`.
    """

    def loop() -> None:
        with (
            pytest.MonkeyPatch.context() as patch,
            allranks.join(layout=layout, precision="float64", run=folder, **keys) as world,
        ):
            torch.manual_seed(3)
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, torch.optim.AdamW, lr=0.01)
            world.ema(model, decay=0.5)
            stream = world.stream(Samples(), global_batch=8, epochs=None, steps=4)
            world.resume(model, optimizer, stream)
            optimizer = meddle(world, model, patch) or optimizer
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
                with contextlib.suppress(catch):
                    world.save(every=2)

    return refusal(loop)


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def step_another(world: Any, model: Any, patch: pytest.MonkeyPatch) -> Any:
    """Another optimizer steps than `world.resume` was given."""
    return world.optimizer(model, torch.optim.AdamW, lr=0.02)


def change_after_the_save(world: Any, model: Any, patch: pytest.MonkeyPatch) -> None:
    """As where a save keeps references that are written later; on rank 1 alone, where there is one."""
    from allranks.training import saver

    right = saver.save  # type: ignore[attr-defined]

    def late(*args: Any, **named: Any) -> Any:
        found = right(*args, **named)
        if world.rank == world.size - 1:
            world._ground.models.trained.local("heads.3.bias").add_(1.0)
        return found

    patch.setattr(saver, "save", late)


def forget_the_average(world: Any, model: Any, patch: pytest.MonkeyPatch) -> None:
    object.__setattr__(world._loop._saver._contents, "beside", ())


REPORT = "if no memory or disk is at fault, please report it"
NAMED = "give world.resume the optimizer that world.step is given"
UNPROVEN = {
    "another optimizer": (step_another, "its optimizer is not the one that makes the steps", NAMED),
    "no average": (forget_the_average, "ema.scale is not in it", REPORT),
    "other values": (change_after_the_save, "1 tensors differ from their digests: 'model.heads.3.bias'", REPORT),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_the_first_checkpoint_is_held_against_the_run(tmp_path: Path, name: str) -> None:
    meddle, what, advice = UNPROVEN[name]
    told = saving(str(tmp_path), meddle)
    assert told.startswith("GuardError: a resume from step-00000002 would not go on as the run does: ") and what in told
    assert f"do not resume from it; {advice}" in told
    assert 'mute="checkpoint" silences this sentinel' in told
    (verdict,) = verdicts(tmp_path)
    assert (verdict["kind"], verdict["step"]) == ("checkpoint_unproven", 2)
    assert saved(tmp_path) == [2], "nothing more is saved, at the end neither"


def exchanged(folder: str, kind: type[torch.optim.Optimizer], after: int, steps: int) -> str:
    """A loop in which another optimizer of the class `kind` steps from step `after` on; it saves at its end."""

    def loop() -> None:
        with allranks.join(layout="single", precision="float64", run=folder) as world:
            model = world.parallelize(Net())
            kept, other = (world.optimizer(model, kind, lr=lr) for lr in (0.01, 0.02))
            stream = world.stream(Samples(), global_batch=8, steps=steps)
            world.resume(model, kept, stream)
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(kept if stream.step < after else other)
                world.save(every=100)

    return refusal(loop)


@pytest.mark.parametrize(("kind", "after"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0)], ids=["later", "no state"])
def test_another_optimizer_is_told_though_it_has_the_same_names(
    tmp_path: Path, kind: type[torch.optim.Optimizer], after: int
) -> None:
    told = exchanged(str(tmp_path), kind, after, steps=3)
    assert told.startswith("GuardError: a resume from step-00000003 ") and UNPROVEN["another optimizer"][1] in told


def test_another_optimizer_is_told_after_a_resume(tmp_path: Path) -> None:
    """There the one that is kept has moments of its own, from the checkpoint."""
    assert exchanged(str(tmp_path), torch.optim.AdamW, after=9, steps=2) == "nothing was refused"
    told = exchanged(str(tmp_path), torch.optim.AdamW, after=0, steps=3)
    assert told.startswith("GuardError: a resume from step-00000003 ") and UNPROVEN["another optimizer"][1] in told


def test_a_loop_that_passes_over_it_saves_nothing_more(tmp_path: Path) -> None:
    told = saving(str(tmp_path), step_another, catch=allranks.AllranksError)
    assert told.startswith("GuardError: a resume from step-00000002 would not go on as the run does: ")
    assert saved(tmp_path) == [2]


@pytest.mark.parametrize(
    ("keys", "kinds"), [({"on_finding": "warn"}, ["checkpoint_unproven"]), ({"mute": "checkpoint"}, [])]
)
def test_a_checkpoint_that_is_not_proven_may_be_told_of_alone_or_muted(
    tmp_path: Path, keys: dict[str, Any], kinds: list[str]
) -> None:
    assert saving(str(tmp_path), step_another, **keys) == "nothing was refused"
    assert [one["kind"] for one in verdicts(tmp_path)] == kinds
    assert saved(tmp_path) == [2, 4]


def proven_once(folder: str, layout: str) -> tuple[str, int]:
    """What a right loop was refused with, and how often its checkpoints were held against it."""
    from allranks.training.own import watch

    asked, right = list[Any](), vars(watch)["prove"]

    def noted(*given: Any) -> Any:
        asked.append(given)
        return right(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "prove", noted)
        return saving(folder, layout=layout, on_finding="stop"), len(asked)


@pytest.mark.parametrize("layout", ["ddp", "dp_shard=2"])
def test_a_right_loops_first_checkpoint_is_proven_once_and_silently(pool: Pools, tmp_path: Path, layout: str) -> None:
    assert pool(2).run(proven_once, str(tmp_path), layout) == [("nothing was refused", 1)] * 2
    assert verdicts(tmp_path) == []


@pytest.mark.parametrize(("first", "again"), [({}, {"epochs": 2}), ({"steps": 2}, {"epochs": 1, "global_batch": 7})])
def test_a_resume_with_other_numbers_is_proven_silently(
    tmp_path: Path, first: dict[str, Any], again: dict[str, Any]
) -> None:
    """Its steps are no longer those that follow from its position."""

    def loop(numbers: dict[str, Any], change: list[str]) -> None:
        with allranks.join(layout="single", precision="float64", run=str(tmp_path), change=change) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Samples(9), **{"global_batch": 4} | numbers)
            world.resume(model, optimizer, stream)
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
                world.save(every=100)

    loop(first, [])
    loop(again, ["train.global_batch"] if "global_batch" in again else [])
    assert verdicts(tmp_path) == [] and len(saved(tmp_path)) == 2


def test_all_ranks_hear_of_a_checkpoint_that_one_finds_wrong(pool: Pools, tmp_path: Path) -> None:
    for told in pool(2).run(saving, str(tmp_path), change_after_the_save, "dp_shard=2"):
        assert told.startswith("GuardError: ") and "'model.heads.3.bias'" in told


def caught(folder: str, how: str) -> str:
    """A loop that goes on after a finding that ends the run, or closes the world by itself."""

    def loop() -> None:
        world = allranks.join(layout="single", precision="float64", run=folder, digest_every=2, on_finding="stop")
        model: Any = world.parallelize(Net())
        optimizer = world.optimizer(model, sgd)
        stream = world.stream(Samples(), global_batch=8, epochs=None, steps=6)
        world.resume(model, optimizer, stream)
        try:
            for batch in stream:
                replace_layer(world, model, stream.step)
                world.backward(loss_of(model, batch), targets=count(batch))
                try:
                    world.step(optimizer)
                except allranks.AllranksError:
                    if how == "close":
                        raise
                    if how == "break":
                        break
        finally:
            world.close()

    return refusal(loop)


@pytest.mark.parametrize("how", ["close", "break", "go on"])
def test_whatever_a_loop_makes_of_a_finding_nothing_more_is_saved(tmp_path: Path, how: str) -> None:
    told = caught(str(tmp_path / "run"), how)
    assert told == "nothing was refused" if how == "break" else told.startswith("GuardError: step 4: ")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


@pytest.mark.parametrize("keys", [{"mute": "linkage"}, {"digest_every": 0}], ids=str)
def test_who_is_muted_says_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    given = {"digest_every": 1} | keys
    assert spoilt(str(tmp_path / "run"), "single", replace_layer, **given) == "nothing was refused"
    assert verdicts(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"on_finding": "maybe"}, "ConfigError: argument 'guard.on_finding=maybe'"),
        ({"digest_every": -1}, "ConfigError: argument 'guard.digest_every=-1'"),
        ({"mute": "replica"}, "ConfigError: "),
        ({"digest_evry": 1}, "ConfigError: join(digest_evry=...): no such argument; did you mean 'digest_every'?"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    found = spoilt(str(tmp_path / "run"), "single", nothing, **keys)
    assert found.startswith(told) and "\n" not in found
    assert not (tmp_path / "run").exists()


LAYOUTS = ["ddp", "fsdp", "dp_shard=2,sharding=optimizer", "tp=2"]


def test_a_right_loop_hears_nothing(pool: Pools, tmp_path: Path) -> None:
    """Thirteen samples a step, of which ranks get different numbers; the last batch leaves one without any."""

    def case() -> None:
        for layout in LAYOUTS:
            folder = folder_of(tmp_path, layout)
            own_loop(folder, layout, join=EVERY, global_batch=13, micro_batch=2, max_norm=0.5)
        own_loop(str(tmp_path / "apart"), "ddp", join=EVERY | {"local_sgd": 2}, global_batch=6, steps=6)

    pool(2).run(case, timeout=240)
    for folder in tmp_path.iterdir():
        assert verdicts(folder) == [], folder
    assert len(list(tmp_path.iterdir())) == len(LAYOUTS) + 1


@pytest.mark.full
def test_a_right_loop_that_the_world_drives_hears_nothing(pool: Pools, tmp_path: Path) -> None:
    def case() -> None:
        for layout in ("pp=2", "cp=2"):
            run_loop(folder_of(tmp_path, layout), layout, "transformer", 0.5, **EVERY)

    pool(2).run(case, timeout=240)
    assert [verdicts(folder) for folder in tmp_path.iterdir()] == [[], []]


def test_a_resumed_one_with_dropout_and_adam_hears_nothing(pool: Pools, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "run"

    def case() -> None:
        import allranks as there

        join = there.join
        there.join = lambda **given: join(**given, **EVERY)
        try:
            resumable(str(folder), "ddp", steps=3, global_batch=8, micro_batch=2)
            resumable(str(folder), "ddp", steps=3, global_batch=8, micro_batch=2)
        finally:
            there.join = join

    pool(2).run(case, timeout=240)
    assert verdicts(folder) == []


def rename(world: Any, model: Any, step: int) -> None:
    """What torch's pruning and parametrisations do: the same parameter gets another name."""
    if step == 2:
        nn.utils.parametrize.register_parametrization(model.heads[0], "weight", nn.Identity())
        nn.utils.prune.l1_unstructured(model.heads[1], "weight", amount=0.3)


def test_a_parameter_under_another_name_is_the_same_parameter(tmp_path: Path) -> None:
    assert spoilt(str(tmp_path / "run"), "single", rename, **EVERY) == "nothing was refused"
    assert verdicts(tmp_path / "run") == []


class Projected(torch.optim.Optimizer):
    """Keeps a moment of a projection of each gradient, under the name that Adam has for its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            state.setdefault("exp_avg", torch.zeros(3, dtype=parameter.dtype)).mul_(0.9)
            parameter.data.sub_(parameter.grad, alpha=0.01)


def looped(folder: str, lines: Callable[[Any, Any, Any, int], Any], **keys: Any) -> str:
    """A loop in which `lines(world, model, optimizer, step)` comes before each step; it gives the optimizer to take."""

    def loop() -> None:
        with allranks.join(precision="float64", run=folder, **keys) as world:
            torch.manual_seed(3)
            model = world.parallelize(Counting())
            optimizer = world.optimizer(model, sgd)
            for batch in world.stream(Samples(), global_batch=8, epochs=None, steps=6):
                world.backward(loss_of(model, batch), targets=count(batch))
                optimizer = lines(world, model, optimizer, world._loop.done) or optimizer  # type: ignore[union-attr]
                world.step(optimizer)

    return refusal(loop)


class Counting(Net):
    """Counts its forwards."""

    forwards: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        return super().forward(x)


def projected(world: Any, model: Any, optimizer: Any, step: int) -> Any:
    return world.optimizer(model, Projected) if step == 0 else None


def test_what_another_optimizer_keeps_is_its_own_business(tmp_path: Path) -> None:
    assert looped(str(tmp_path / "run"), projected, **EVERY) == "nothing was refused"
    assert verdicts(tmp_path / "run") == []


def add_group(world: Any, model: Any, optimizer: Any, step: int) -> Any:
    if step == 2:
        extra = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        extra.grad = torch.ones_like(extra)
        optimizer.add_param_group({"params": [extra]})


def second_optimizer(world: Any, model: Any, optimizer: Any, step: int) -> Any:
    return world.optimizer(model, torch.optim.SGD, lr=0.01) if step == 3 else None


def test_parameters_that_are_added_are_told_of(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        return looped(str(tmp_path / "run"), add_group, digest_every=2)

    assert pool(2).run(case) == ["nothing was refused"] * 2
    (verdict,) = verdicts(tmp_path / "run")
    assert verdict["kind"] == "optimizer_unlinked" and "that is no parameter" in verdict["what"]


def test_a_second_optimizer_is_watched_and_fillers_are_not_forgotten(pool: Pools, tmp_path: Path) -> None:
    """Of 37 samples in eights the fifth batch leaves a rank without: its counter then differs, and rightly so."""

    def case() -> list[str]:
        right = looped(str(tmp_path / "right"), second_optimizer, **EVERY)

        def spoilt_state(world: Any, model: Any, optimizer: Any, step: int) -> Any:
            made = second_optimizer(world, model, optimizer, step)
            if step == 5 and world.rank == 1:
                next(iter(model.parameters())).data.view(-1)[0] += 1.0
            return made

        return [right, looped(str(tmp_path / "wrong"), spoilt_state, digest_every=1)]

    for right, wrong in pool(2).run(case):
        assert right == "nothing was refused"
        assert wrong.startswith("GuardError: after step 6 rank 0")
    assert verdicts(tmp_path / "right") == []


@pytest.mark.parametrize("added_at", [0, 2])
def test_what_no_checkpoint_keeps_is_refused_at_once_or_when_it_is_saved(tmp_path: Path, added_at: int) -> None:
    def loop() -> None:
        with allranks.join(layout="single", precision="float64", run=str(tmp_path / "run")) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Samples(), global_batch=8)
            world.resume(model, optimizer, stream)
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                if stream.step == added_at:
                    add_group(world, model, optimizer, 2)
                world.step(optimizer)
                world.save()

    assert refusal(loop).startswith("TaskError: SGD holds a tensor of shape (3,) that is no parameter of the model")
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == added_at


def test_ranks_that_were_given_other_keys_are_refused_together(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        import os

        return spoilt(str(tmp_path / "run"), "ddp", nothing, digest_every=1 + int(os.environ["RANK"]))

    for told in pool(2).run_alone(case):
        assert told.startswith(
            "ConfigError: rank 1 was started with other settings than rank 0: guard.digest_every = 2"
        )


def test_what_is_noticed_is_told_while_copies_are_apart(pool: Pools, tmp_path: Path) -> None:
    """What a rank notices is told while they are."""

    def case() -> str:
        def spoil(world: Any, model: Any, step: int) -> None:
            if step >= 3:
                reseed(world, model, step)

        return spoilt(str(tmp_path / "run"), "ddp", spoil, digest_every=2, local_sgd=5)

    assert pool(2).run(case) == ["nothing was refused"] * 2
    assert [(one["kind"], one["step"]) for one in verdicts(tmp_path / "run")] == [("reseeded", 4)]


@pytest.mark.full
def test_a_right_loop_on_four_hears_nothing(pool: Pools, tmp_path: Path) -> None:
    layouts = ("dp_replicate=2,dp_shard=2", "tp=2,dp_shard=2", "dp_shard=4,sharding=optimizer")

    def case() -> None:
        for layout in layouts:
            own_loop(folder_of(tmp_path, layout), layout, join=EVERY, global_batch=13, micro_batch=2)
        run_loop(str(tmp_path / "staged"), "pp=2,dp_replicate=2", "transformer", 0.5, **EVERY)

    pool(4).run(case, timeout=240)
    assert [verdicts(folder) for folder in tmp_path.iterdir()] == [[]] * 4
