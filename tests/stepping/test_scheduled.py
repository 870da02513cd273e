"""A step through a pipeline, as the rest of the step sees it."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.parallel.stage_draws import stage_seed
from allranks.stepping.fixed_draws import FixedDraws
from allranks.stepping.passes import PlainPasses
from allranks.stepping.scheduled import ScheduledPasses
from allranks.task import Hints
from allranks.training.validate import validate
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import IGNORED, Tiny

pytestmark = pytest.mark.distributed


class Noting(nn.Module):
    """A layer that notes with which seed it runs, and how often in training."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seeds: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seeds.append(torch.initial_seed())
            self.calls += 1
        found: torch.Tensor = torch.tanh(self.linear(x))
        return found


class Noted(Tiny):
    """Two such layers: a stage each."""

    def model(self) -> nn.Module:
        return nn.Sequential(Noting(), Noting())

    def dataset(self, split: str) -> Any:
        return Tiny().dataset(split)


CONFIG = ("train.global_batch=12", "train.micro_steps=2", "optimizer.name=sgd", "optimizer.lr=0.1")


def note(steps: int) -> Any:
    """In a worker: keys of the micro-steps and the seeds of this rank's stage; the counter, and who makes the step."""
    session = session_of(Noted(), config_of("pp=2", *CONFIG))
    layers = [m for m in session.spread.bare().modules() if isinstance(m, Noting)]
    rank = dist.get_rank()
    for layer in layers:
        layer.seeds.clear()
    keys = [m.random_key for stepped in step_through(session, steps) for m in stepped.batch.micro_steps]
    counter = int(session.spread.local(f"{rank}.calls"))
    return keys, layers[rank].seeds, layers[1 - rank].seeds, counter


def test_every_stage_draws_numbers_of_its_own(pool: Pools) -> None:
    """Law 6. The first forward of a new shape finds out what travels, and leaves nothing behind."""
    (keys, first, other, counted), (_, last, _, also) = pool(2).run(note, 2)
    assert len(keys) == 4
    assert [first[-4:], last[-4:]] == [[stage_seed(key, stage) for key in keys] for stage in (0, 1)]
    assert len(first) == len(last) == 5 and first[0] == stage_seed(keys[0], 0)
    assert other == [] and counted == also == 4
    assert len({*first, *last}) == 8


class Narrowing(nn.Module):
    """Drops some of what it hands on, in training alone."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.linear, self.drops = nn.Linear(5, 5), drops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(nn.functional.linear(x, self.linear.weight[:, : x.shape[-1]], self.linear.bias))
        return found[:, :3] if self.drops and self.training else found


class Narrowed(Tiny):
    """Two stages, between which a training step sends less than an evaluation."""

    def model(self) -> nn.Module:
        return nn.Sequential(Narrowing(True), Narrowing(False))


def losses_of(layout: str) -> list[float]:
    session = session_of(Narrowed(), config_of(layout, *CONFIG))
    return [validate(session)["loss"], *(stepped.loss for stepped in step_through(session, 2))]


def test_what_is_sent_may_have_another_shape_in_training(pool: Pools) -> None:
    (alone,) = pool(1).run(losses_of, "single")
    for found in pool(2).run(losses_of, "pp=2"):
        assert found == pytest.approx(alone, rel=1e-12)


def kinds() -> list[str]:
    return [
        type(session_of(Tiny(kind="mlp"), config_of(layout, *CONFIG)).step._passes).__name__
        for layout in ("pp=2", "ddp")
    ]


def test_a_pipeline_has_passes_of_its_own(pool: Pools) -> None:
    assert pool(2).run(kinds) == [[ScheduledPasses.__name__, PlainPasses.__name__]] * 2


@pytest.mark.parametrize("batchnorm", ["sync", "local"])
def test_batch_statistics_see_micro_steps(pool: Pools, batchnorm: str) -> None:
    """M is the same with and without a pipeline, so a BatchNorm sees the same samples (law 2)."""
    pp, dp = f"pp=2,dp_replicate=2,batchnorm={batchnorm}", f"ddp,batchnorm={batchnorm}"
    found = together(pool(4).run(normalise, pp)) if batchnorm == "sync" else None
    alone = together(pool(1).run(normalise, "single"))
    if found is not None:
        assert found.keys() == alone.keys()
        assert all(torch.allclose(found[name], alone[name], rtol=1e-11, atol=1e-13) for name in alone)
        return
    piped, plain = pool(4).run(normalise, pp), pool(2).run(normalise, dp)
    for replica in range(2):
        both = piped[replica] | piped[2 + replica]
        for name, (_, _, value) in plain[replica].items():
            assert torch.allclose(both[name][2], value, rtol=1e-11, atol=1e-13), name


class Normal(Tiny):
    """Points through layers with batch statistics."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh()),
            nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh()),
            nn.Linear(7, 3),
        )

    def dataset(self, split: str) -> Any:
        return Tiny().dataset(split)


def normalise(layout: str) -> Any:
    session = session_of(Normal(), config_of(layout, *CONFIG))
    for _ in step_through(session, 3):
        pass
    return parts_of(session)


class WithStep(Noted):
    """Says itself what a step is."""

    def step(self, models: Any, batch: Any) -> Any:
        yield "", self.loss(models(batch["x"]), batch), len(batch["y"])


def refuse() -> str:
    try:
        session_of(WithStep(), config_of("pp=2", *CONFIG))
    except TaskError as error:
        return str(error)
    return "nothing"


def test_a_step_of_its_own_is_refused(pool: Pools) -> None:
    told = pool(2).run(refuse)
    assert told[0] == told[1] and told[0].startswith("WithStep has a step() of its own, and pp=2 orders forwards")


class Hiding(nn.Module):
    """Draws between its layers what it hides before them and again behind them, and how the loss weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)])

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        seen = torch.rand(x.shape) > 0.5 if self.training else torch.ones(x.shape)
        hidden = (x + noise) * seen
        for layer in self.layers[:-1]:
            if not self.training or torch.rand(()) < 0.7:  # a layer is skipped, as LayerDrop does
                hidden = torch.tanh(layer(hidden))
            hidden = hidden * 1.0
        found: torch.Tensor = self.layers[-1](hidden * seen + torch.randn_like(x) * self.training)
        return found


class HidingTask(Noted):
    def model(self) -> nn.Module:
        return Hiding()

    def inputs(self, batch: Any) -> Any:
        return {"x": batch["x"], "noise": torch.rand_like(batch["x"]) * 1e-3}

    def hints(self) -> Hints:
        return Hints(blocks=("layers.*",), split_before=("layers.3",))


def hide(layout: str) -> Any:
    """In a worker: losses of a model that draws between its modules."""
    with FixedDraws():  # at the start the noise of the inputs is the same everywhere
        session = session_of(HidingTask(), config_of(layout, *CONFIG))
    return [stepped.loss for stepped in step_through(session, 3)]


def test_what_a_forward_draws_between_modules_is_the_same_on_all_stages_and_on_one_device(pool: Pools) -> None:
    found, alone = pool(2).run(hide, "pp=2"), pool(1).run(hide, "single")[0]
    assert found[0] == pytest.approx(alone, rel=1e-6) and found[0] == found[1]


def drop(layout: str) -> Any:
    """In a worker: losses of a model that drops."""
    session = session_of(Dropping(), config_of(layout, *CONFIG, "train.seed=3"))
    random.seed(0)
    return [stepped.loss for stepped in step_through(session, 2)]


class Dropping(Noted):
    """Two layers, the second of which drops."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)))


def test_dropout_is_the_same_in_every_run_and_not_that_of_one_device(pool: Pools) -> None:
    first, second, alone = pool(2).run(drop, "pp=2"), pool(2).run(drop, "pp=2"), pool(1).run(drop, "single")
    assert first == second and first[0] == first[1] and first[0] != alone[0]
    assert first[0] == pytest.approx(alone[0], rel=0.5)


class Ragged(Tiny):
    """Words of unlike length, padded to the longest of their micro-step: every rank has shapes of its own."""

    def model(self) -> nn.Module:
        return Tiny(kind="tied").model()

    def dataset(self, split: str) -> Any:
        whole = Tiny(kind="tied").dataset(split)
        return [{name: part[: 2 + index % 5] for name, part in whole[index].items()} for index in range(len(whole))]

    def collate(self, samples: Any) -> Any:
        pad = torch.nn.utils.rnn.pad_sequence
        padding = {"x": 0, "y": IGNORED}
        return {n: pad([s[n] for s in samples], batch_first=True, padding_value=p) for n, p in padding.items()}


def run_ragged(layout: str) -> list[float]:
    cut = "train.global_batch=8", "train.micro_steps=2"
    session = session_of(Ragged(), config_of(layout, *CONFIG[2:], *cut, steps=6))
    return [stepped.loss for stepped in step_through(session, 6)]


@pytest.mark.parametrize(("layout", "world_size"), [("pp=2", 2), ("pp=2,dp_shard=2", 4), ("pp=2,dp_replicate=2", 4)])
def test_ranks_with_other_shapes_go_one_way(pool: Pools, layout: str, world_size: int) -> None:
    """Some steps go as the schedule says, others in turn; FSDP's gathers meet in all of them."""
    alone = pool(1).run(run_ragged, "single")[0]
    for losses in pool(world_size).run(run_ragged, layout, timeout=60):
        assert losses == pytest.approx(alone, rel=1e-11)


class Nothing(Noted):
    """The first layer is frozen."""

    def model(self) -> nn.Module:
        model = nn.Sequential(Noting(), Noting())
        model[0].requires_grad_(False)
        return model


def freeze() -> str:
    try:
        session_of(Nothing(), config_of("pp=2", *CONFIG))
    except LayoutError as error:
        return str(error)
    return "nothing"


def test_a_stage_without_anything_to_learn_is_refused(pool: Pools) -> None:
    for told in pool(2).run(freeze):
        assert "pp=2 leaves process 0 of a pipeline with frozen parameters only" in told
