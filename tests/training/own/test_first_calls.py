"""A model whose layers or experts are cut is compared with the whole one when a loop first calls it."""

import importlib
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import allranks
from allranks.models.moe import Experts
from allranks.run import Run
from allranks.training.door import World
from allranks.verdict import Decision
from tests.distributed.pool import Pools
from tests.distributed.tasks import Words
from tests.training.own.cases import everything, refusal, sgd
from tests.training.own.runs import BATCH, folder_of, model_of, words_loss

pytestmark = pytest.mark.distributed

first_calls: Any = importlib.import_module("allranks.training.own.first_calls")
whole_check: Any = importlib.import_module("allranks.stepping.whole_check")

AGREES = "the cut model computes what the whole one does"
UNCOMPARED = "the cut model was not compared with the whole one"
OFF = Decision("not compared", "the test says so")


class Pair(nn.Module):
    """Two layers that structure finds, and something between them."""

    def __init__(self, between: str = "tanh", drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(drop)
        self.between, self.num_heads = between, 4
        self.given: list[float] = []

    def forward(self, x: torch.Tensor, *, shift: Any = 0.0) -> torch.Tensor:
        self.given.append(float(x.detach().sum()))
        x.mul_(0.5)  # it writes into what it is given
        with torch.autocast("cpu", torch.bfloat16) if self.between == "bfloat16" else nullcontext():
            found: torch.Tensor = self.down(self.act(self.drop(self.up(x))))
        if isinstance(shift, float):
            found = found + shift
        found = found.to(x.dtype)
        if self.between == "draws":
            found = found * torch.rand_like(found)
        return found

    def act(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.between == "softmax":
            return functional.softmax(hidden, -1)
        if self.between == "heads":
            by_head = hidden.view(len(hidden), 5, self.num_heads, -1)
            return functional.softmax(by_head, -1).flatten(2)
        return torch.tanh(hidden)


class Boxed:
    """What a model may return, and nobody looks into."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxing(Pair):
    def forward(self, x: torch.Tensor, *, shift: Any = 0.0) -> Any:
        return Boxed(super().forward(x))


class Locked(Pair):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return build()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(17, 5, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(17, 5, 3, generator=generator, dtype=torch.float64))


def distance(output: Any, batch: Any) -> torch.Tensor:
    value = output.value if isinstance(output, Boxed) else output
    found: torch.Tensor = (value - batch[1]).square().sum()
    return found


def called(world: World, model: nn.Module, batch: Any) -> None:
    world.backward(distance(model(batch[0].clone()), batch), targets=len(batch[0]))


def driven(world: World, model: nn.Module, batch: Any) -> None:
    world.run((batch[0].clone(), batch[1]), distance, targets=len(batch[0]))


class Ended(NamedTuple):
    """How a loop has ended on one rank: why it was refused, what it has learnt, and what its model was given."""

    refused: str
    learnt: dict[str, torch.Tensor]
    given: int


def loop(
    folder: str,
    layout: str,
    build: Callable[[], nn.Module],
    lines: Callable[[World, nn.Module, Any], object] = called,
    change: Callable[[World, nn.Module], object] = lambda world, model: None,
    **join: Any,
) -> Ended:
    """In a worker: a loop whose forward and backward are `lines`, after `change` was made on the model."""
    with allranks.join(layout=layout, run=folder, **{"precision": "float64", **join}) as world:
        module = built(build)
        model = world.parallelize(module)
        optimizer = world.optimizer(model, sgd)
        change(world, model)

        def train() -> None:
            for batch in world.stream(samples(), global_batch=6, micro_steps=2, seed=1, epochs=2):
                lines(world, model, batch)
                world.step(optimizer)

        refused = refusal(train)  # an error that leaves the world would stay with the process
        return Ended(refused, everything(world), len(getattr(module, "given", ())))


def said(folder: str) -> list[tuple[str, str]]:
    """What was decided about the comparison, and because of what."""
    found = [(event["what"], event["because"]) for event in Run.open(Path(folder)).events() if "because" in event]
    return [(what, because) for what, because in found if what in (AGREES, UNCOMPARED)]


@pytest.mark.parametrize("lines", [called, driven])
@pytest.mark.parametrize(
    ("layout", "size"),
    [("tp=2", 2), ("dp_shard=2,tp=2", 4), pytest.param("dp_replicate=2,tp=2", 4, marks=pytest.mark.full)],
)
def test_code_that_looks_at_whole_channels_is_refused_on_every_rank(
    pool: Pools, tmp_path: Path, layout: str, size: int, lines: Any
) -> None:
    def case() -> list[str]:
        folders = {between: str(tmp_path / between) for between in ("softmax", "heads")}
        return [loop(folder, layout, lambda: Pair(between), lines).refused for between, folder in folders.items()]  # noqa: B023

    for rank in pool(size).run(case, timeout=240):
        for found in rank:
            assert found.startswith(f"LayoutError: layout {layout} does not compute what one process computes: ")
            assert " for the whole model. Code between the cut layers looks at whole tensors (a number of" in found
            assert "in hints().tensor, or in a loop of your own in world.parallelize(tensor=)" in found


def test_what_is_right_trains_as_one_device_does(pool: Pools, tmp_path: Path) -> None:
    (expected,) = pool(1).run(loop, str(tmp_path / "one"), "single", Pair)
    for lines in (called, driven):
        folder = str(tmp_path / lines.__name__)
        for rank, found in enumerate(pool(2).run(loop, folder, "tp=2", Pair, lines)):
            assert found.refused == "nothing was refused" and found.given == expected.given
            for name, cut in (("up.weight", 0), ("down.weight", 1)):
                part = expected.learnt[name].chunk(2, cut)[rank]
                torch.testing.assert_close(found.learnt[name], part, rtol=1e-11, atol=1e-14)
        assert said(folder) == [
            (AGREES, "weighted sum of the outputs and 4 gradients of the first call of Pair agree"),
        ]


@pytest.mark.parametrize(("layout", "size"), [("tp=2", 2), ("tp=2,dp_shard=2", 4)])
def test_the_comparison_changes_no_bit_and_leaves_nothing_behind(
    pool: Pools, tmp_path: Path, layout: str, size: int
) -> None:
    def case(name: str) -> Ended:
        return loop(str(tmp_path / name), layout, lambda: Pair("draws", drop=0.3), precision="float32", lines=lowered)

    def lowered(world: World, model: nn.Module, batch: Any) -> None:
        called(world, model, [one.float() for one in batch])

    def without() -> Ended:
        with patch.object(first_calls, "compare_call", lambda *_: OFF):
            return case("without")

    for compared, plain in zip(pool(size).run(lambda: case("with")), pool(size).run(without), strict=True):
        assert compared.refused == plain.refused == "nothing was refused" and compared.given == plain.given > 0
        assert all(torch.equal(compared.learnt[name], value) for name, value in plain.learnt.items())
    assert [what for what, _ in said(str(tmp_path / "with"))] == [AGREES] and not said(str(tmp_path / "without"))


def halved(world: World, model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def hooked(world: World, model: Any) -> None:
    model.up.register_forward_hook(lambda *_: None)


def renamed(world: World, model: Any) -> None:
    model.num_heads = 2


def past(world: World, model: Any, batch: Any) -> None:
    world.backward(distance(model.down(torch.tanh(model.up(batch[0]))), batch), targets=len(batch[0]))


def with_an_object(world: World, model: nn.Module, batch: Any) -> None:
    world.backward(distance(model(batch[0].clone(), shift=threading.Lock()), batch), targets=len(batch[0]))


def by_two_numbers(world: World, model: nn.Module, batch: Any) -> None:
    world.backward(distance(model(batch[0].clone(), shift=float(world.rank // 2)), batch), targets=len(batch[0]))


# what the loop does -> (its arguments, why nothing is compared)
UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "loaded": ({"change": halved}, "its values are not those with which it was spread"),
    "hooked": ({"change": hooked}, "a hook of up was changed after it was spread"),
    "changed": ({"change": renamed}, "num_heads of the model was changed after it was spread"),
    "past it": ({"lines": past}, "no call of Pair was seen before the first backward"),
    "an object": ({"lines": with_an_object}, "its forward gets a lock, of which no copies can be made for it"),
    "a box": ({"build": Boxing}, "it returns a Boxed, in which no tensor of floating numbers is found"),
    "a lock": ({"build": Locked}, "rank 0 could not copy it (TypeError: cannot pickle '_thread.lock' object)"),
}


def test_what_cannot_be_compared_is_said_and_trains(pool: Pools, tmp_path: Path) -> None:
    def case() -> list[str]:
        arguments = {name: {"build": Pair, **given} for name, (given, _) in UNKNOWN.items()}
        found = [loop(folder_of(tmp_path, name), "tp=2", **given).refused for name, given in arguments.items()]
        with patch.object(whole_check, "LARGEST_FLOPS", 0.0):
            return [*found, loop(str(tmp_path / "large"), "tp=2", Pair).refused]

    assert pool(2).run(case, timeout=240) == [["nothing was refused"] * (len(UNKNOWN) + 1)] * 2
    for name, (_, because) in UNKNOWN.items():
        assert said(folder_of(tmp_path, name)) == [(UNCOMPARED, because)]
    ((what, because),) = said(str(tmp_path / "large"))
    assert what == UNCOMPARED and because.startswith("one process would need ")


class Gathering(Pair):
    """Its forward asks the world for the rows of all ranks."""

    world: World

    def forward(self, x: torch.Tensor, *, shift: Any = 0.0) -> torch.Tensor:
        rows = self.world.gather(x.mean((1, 2), keepdim=False).unsqueeze(1))
        return super().forward(x) + rows.detach().mean()


def join_in(world: World, model: Any) -> None:
    Gathering.world = world


def test_ranks_that_speak_or_differ_are_not_compared(pool: Pools, tmp_path: Path) -> None:
    def case() -> list[str]:
        layout = "tp=2,dp_replicate=2"
        first = loop(str(tmp_path / "speaks"), layout, Gathering, change=join_in)
        return [first.refused, loop(str(tmp_path / "numbers"), layout, Pair, by_two_numbers).refused]

    assert pool(4).run(case, timeout=240) == [["nothing was refused"] * 2] * 4
    ((what, because),) = said(str(tmp_path / "speaks"))
    assert what == UNCOMPARED and "its forward speaks with other processes (all" in because
    assert said(str(tmp_path / "numbers")) == [
        (UNCOMPARED, "processes call it with arguments of other kinds, or other numbers")
    ]


def test_frozen_models_lower_types_and_evaluations_are_compared_too(pool: Pools, tmp_path: Path) -> None:
    def with_teacher(between: str) -> Ended:
        teachers: list[nn.Module] = []

        def taught(world: World, model: nn.Module, batch: Any) -> None:
            with torch.no_grad():
                aim = teachers[0](batch[0].clone())
            world.backward(distance(model(batch[0].clone()), (batch[0], aim)), targets=len(batch[0]))

        def make(world: World, model: nn.Module) -> None:
            teachers.append(world.parallelize(Pair(between).requires_grad_(False)))

        return loop(str(tmp_path / f"teacher-{between}"), "tp=2", Pair, taught, make)

    def in_autocast(world: World, model: nn.Module, batch: Any) -> None:
        x = batch[0].float()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x.bfloat16())
        world.backward(distance(output.float(), (x, batch[1].float())), targets=len(x))

    def in_float32(world: World, model: nn.Module, batch: Any) -> None:
        called(world, model, [one.float() for one in batch])

    def before(world: World, model: nn.Module) -> None:
        measured = lambda batch: {"distance": (distance(model(batch[0].clone()), batch), len(batch[0]))}  # noqa: E731
        world.evaluate(samples(), measured, batch=6)

    def case() -> list[str]:
        lower = loop(str(tmp_path / "lower"), "tp=2", Pair, in_autocast, precision="float32")
        own = loop(str(tmp_path / "own"), "tp=2", lambda: Pair("bfloat16"), in_float32, precision="float32")
        half, mixed = (
            loop(str(tmp_path / f"half-{between}"), "tp=2", partial(Pair, between), in_float32, precision="float16")
            for between in ("tanh", "softmax")
        )
        evaluated = refusal(lambda: loop(str(tmp_path / "evaluated"), "tp=2", lambda: Pair("softmax"), change=before))
        right = with_teacher("tanh"), lower, own, half
        return [*(one.refused for one in (*right, with_teacher("softmax"), mixed)), evaluated]

    for *right, wrong, mixed, evaluated in pool(2).run(case, timeout=240):
        assert right == ["nothing was refused"] * 4
        assert "computes: the weighted sum of the outputs is" in wrong and "computes: the gradient of" in evaluated
        assert mixed.startswith("LayoutError: layout tp=2 does not compute what one process computes: ")
    assert [what for what, _ in said(str(tmp_path / "teacher-tanh"))] == [AGREES, AGREES]
    assert [what for name in ("lower", "own", "half-tanh") for what, _ in said(str(tmp_path / name))] == [AGREES] * 3


class Averaging(Experts):
    """Experts that divide by how many there are: a part of them by fewer."""

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, tokens_per_expert) / len(tokens_per_expert)


@pytest.mark.parametrize("layout", ["dp_replicate=2,ep=2", pytest.param("dp_shard=2,ep=2", marks=pytest.mark.full)])
def test_experts_that_are_cut_are_compared(pool: Pools, tmp_path: Path, layout: str) -> None:
    def train(name: str, *, wrong: bool) -> str:
        with allranks.join(layout=layout, precision="float64", run=str(tmp_path / name)) as world:
            module = model_of("moe")
            if wrong:
                module.get_submodule("layers.1.feed_forward").register_module("experts", Averaging(4, 48, 5))
            model = world.parallelize(module)
            optimizer = world.optimizer(model, sgd)

            def loop() -> None:
                for batch in world.stream(Words(), global_batch=BATCH, steps=2):
                    world.backward(words_loss(model(batch["x"]), batch), targets=int((batch["y"] != -100).sum()))
                    world.step(optimizer)

            return refusal(loop)

    ranks = pool(2).run(lambda: [train("right", wrong=False), train("wrong", wrong=True)])
    for right, wrong in ranks:
        assert right == "nothing was refused"
        assert wrong.startswith(f"LayoutError: layout {layout} does not compute what one process computes")
    assert [what for what, _ in said(str(tmp_path / "right"))] == [AGREES]
