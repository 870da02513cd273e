"""`world.run` under every layout: what one device computes (law 4), and what else a loop asks for."""

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import allranks
from allranks.run import Run
from allranks.training.door import World
from allranks.training.own.driven import Driven, _code_of
from allranks.verifying.parity import Parts, RecordedStep, compare
from allranks.verifying.reference import ReferenceStep
from tests.distributed.pool import Pools
from tests.distributed.tasks import Words
from tests.training.own.cases import refusal, sgd, with_journal
from tests.training.own.runs import (
    BATCH,
    evaluated,
    folder_of,
    model_of,
    plain_metrics,
    plain_words,
    resumable,
    run_loop,
    words_loss,
    words_metrics,
)

pytestmark = pytest.mark.distributed

whole_check: Any = importlib.import_module("allranks.stepping.whole_check")

LAYOUTS = [
    ("single", 1),
    ("ddp", 2),
    ("tp=2", 2),
    ("pp=2", 2),
    ("cp=2", 2),
    ("pp=2,dp_replicate=2", 4),
    ("pp=2,cp=2", 4),
]
MORE = [
    ("fsdp", 2),
    ("pp=2,schedule=gpipe", 2),
    ("pp=2,dp_shard=2", 4),
    ("pp=2,tp=2", 4),
    ("cp=2,dp_shard=2", 4),
    ("cp=2,dp_replicate=2", 4),
    ("cp=2,tp=2", 4),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "size"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.full) for one in MORE)])
def test_one_loop_is_what_one_device_computes(pool: Pools, tmp_path: Path, layout: str, size: int) -> None:
    folder = folder_of(tmp_path, layout)
    ranks = pool(size).run(run_loop, folder, layout, "transformer", None, timeout=240)
    expected, model = plain_words("transformer", None)
    differences = compare([with_journal(rank.steps, Path(folder)) for rank in ranks], expected)
    assert not differences, "; ".join(map(str, differences[:5]))
    final = plain_metrics(model)
    for rank in ranks:
        assert rank.evaluations[1] == pytest.approx(final, rel=1e-11)
        assert rank.evaluations[0]["loss"] > rank.evaluations[1]["loss"]


def test_the_ring_is_asked_for_by_its_key(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:  # it takes sequences that divide by twice as many, which these do not
        with allranks.join(layout="cp=2", precision="float64", run=str(tmp_path / "run"), context="ring") as world:
            world.parallelize(model_of("transformer"))
            return refusal(lambda: evaluated(world))

    assert all("because ring attention gives each process two chunks" in found for found in pool(2).run(case))


def test_every_stage_has_the_losses_and_clipping_is_over_all(pool: Pools, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "pp")
    ranks = pool(2).run(run_loop, folder, "pp=2", "tied", 0.05)
    expected, _ = plain_words("tied", 0.05)
    assert [line["loss"] for line in Run.open(Path(folder)).steps()] == pytest.approx(
        [step.loss for step in expected], rel=1e-12
    )
    norms = [line["grad_norm"] for line in Run.open(Path(folder)).steps()]
    assert norms == pytest.approx([step.norm for step in expected], rel=1e-12) and min(norms) > 0.05
    for step, last in ((0, False), (-1, True)):
        name = "blocks.1.linear.weight"
        found = next(rank.steps[step].parameters[name][1] for rank in ranks if name in rank.steps[step].parameters)
        torch.testing.assert_close(found, expected[step].parameters[name], rtol=1e-11, atol=1e-14)
        assert ranks[0].losses[step] == ranks[1].losses[step]
        # 61 samples in steps of 8: the last has 5.
        assert len(ranks[0].losses[step]) == 4 and (len(expected) == 8 or not last)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "size"), [("pp=2", 2), ("cp=2", 2)])
def test_a_resumed_loop_is_bitwise_the_uninterrupted_one(pool: Pools, tmp_path: Path, layout: str, size: int) -> None:
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    expected = pool(size).run(resumable, whole, layout)
    assert pool(size).run(lambda: resumable(broken, layout, crash_after=5)) == [None] * size
    found = pool(size).run(resumable, broken, layout)
    for before, after in zip(expected, found, strict=True):
        assert before is not None and after is not None and before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert after["lr"].tolist() == pytest.approx([0.0025])
    events = Run.open(Path(broken)).events()
    assert [event["step"] for event in events if event["event"] == "resume"] == [4]
    said = [event["what"] for event in events if event["event"] == "decision"]
    assert "the cut model computes what the whole one does" in said[: len(said) // 2]
    assert "the cut model was not compared with the whole one" in said[-2:]


def test_stages_go_on_as_one_process_does(pool: Pools, tmp_path: Path) -> None:
    """A checkpoint has every stage's parameters, and the settings of their groups."""
    (expected,) = pool(1).run(resumable, str(tmp_path / "one"), "single")
    assert expected is not None
    pool(2).run(lambda: resumable(str(tmp_path / "two"), "pp=2", steps=3))
    (found,) = pool(1).run(resumable, str(tmp_path / "two"), "single")
    assert found is not None and found["lr"].tolist() == expected["lr"].tolist()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


class Residual(nn.Module):
    """Blocks whose sum with what came before them no stage after the first can know."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embedding(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        output: torch.Tensor = self.head(hidden + first)
        return output


class Mixing(nn.Module):
    """Looks at other positions without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        output: torch.Tensor = self.head(hidden + hidden.mean(1, keepdim=True))
        return output


def shifted(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return words_loss(output[:, :-1], {"y": batch["y"][:, 1:]})


def refused(folder: str, layout: str, model: nn.Module, lines: Callable[..., object]) -> str:
    """What a loop whose body is `lines(world, model, optimizer, batch)` is refused with, on one rank."""
    with allranks.join(layout=layout, precision="float64", run=folder) as world:
        spread = world.parallelize(model)
        optimizer = world.optimizer(spread, sgd)

        def loop() -> None:
            for batch in world.stream(Words(), global_batch=BATCH, micro_steps=4, steps=2):
                lines(world, spread, optimizer, batch)

        return refusal(loop)  # an error that leaves the world would stay with the process


def run_and_step(world: World, model: nn.Module, optimizer: Any, batch: Any) -> None:
    world.run(batch, words_loss)
    world.step(optimizer)


MADE_BY_HAND = "where no process has all of a forward: use world.run(batch, loss), and world.evaluate(dataset, metrics"
# case -> (layout, model, the loop's body, what it is refused with)
WRONG: dict[str, tuple[str, Callable[[], nn.Module], Callable[..., object], str]] = {
    "a call": ("pp=2", lambda: model_of("tied"), lambda w, m, o, b: m(b["x"]), MADE_BY_HAND),
    "a call under cp": ("cp=2", lambda: model_of("transformer"), lambda w, m, o, b: m(b["x"]), MADE_BY_HAND),
    "backward": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: w.backward(torch.zeros((), requires_grad=True), targets=1),
        "TaskError: world.backward(): layout pp=2 spreads forward and backward over several processes: use "
        "world.run(batch, loss), which makes both",
    ),
    "no run": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: None,
        "the next batch was asked for, but world.run(batch, loss) of this one never came",
    ),
    "step first": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: w.step(o),
        "world.step() came before world.run(batch, loss) of this batch",
    ),
    "twice": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: [w.run(b, words_loss) for _ in range(2)],
        "world.run() was called twice for one batch: add the losses, and call it once",
    ),
    "a batch from around": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: w.run(b, lambda output, _: words_loss(output, b)),
        "world.run: the loss reads 'b' from around it, and layout pp=2 calls it when the step's last batch has come",
    ),
    "measure": (
        "cp=2",
        lambda: model_of("transformer"),
        lambda w, m, o, b: w.evaluate(Words(), lambda batch: {"n": (1, 1)}, batch=8),
        "world.evaluate(dataset, measure): layout cp=2 spreads a forward over several processes: give metrics=",
    ),
    "a metric of whole sequences": (
        "cp=2",
        lambda: model_of("transformer"),
        lambda w, m, o, b: [
            w.evaluate(Words(), metrics=words_metrics, batch=8),
            w.evaluate(Words(), metrics=lambda output, batch: {"exact": (0, len(output))}, batch=8),
        ],
        "does not measure what one process measures: metrics() gives exact as 0 of 16, summed over the 2 parts",
    ),
    "two ways": (
        "single",
        lambda: model_of("tied"),
        lambda w, m, o, b: w.evaluate(Words(), batch=8),
        "world.evaluate: give either measure(batch) or metrics=, a function of (output, batch)",
    ),
    "two models": (
        "cp=2",
        lambda: model_of("transformer"),
        lambda w, m, o, b: w.parallelize(nn.Linear(2, 2).requires_grad_(False)),
        "layout cp=2 spreads one model, and there is one already: put both into one nn.Module",
    ),
    "a number": (
        "cp=2",
        lambda: model_of("transformer"),
        lambda w, m, o, b: w.run(b, torch.zeros(())),
        "world.run(batch, Tensor): the loss has to be a function of (output, batch) that returns one number",
    ),
    "no batch": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: w.run(7, words_loss),
        "world.run: a batch is 7, and Tied.forward names nothing in it: give a dict with its arguments by name",
    ),
    "targets": (
        "pp=2",
        lambda: model_of("tied"),
        lambda w, m, o, b: w.run(b, words_loss, targets=lambda batch: -1),
        "world.run(targets=-1): the number of targets of this batch, a whole number",
    ),
    "a residual": ("pp=2", Residual, run_and_step, "a sum around a block, as in x + block"),
    "mixed positions": ("cp=2", Mixing, run_and_step, "and all else must look at each position by itself"),
    "a shift": (
        "cp=2",
        lambda: model_of("transformer"),
        lambda w, m, o, b: w.run(b, shifted),
        "shift labels in the dataset, not in loss()",
    ),
    "positions": (
        "cp=2",
        lambda: model_of("transformer"),
        lambda w, m, o, b: w.run({name: value[:, :5] for name, value in b.items()}, words_loss),
        "cp(2) does not divide the 5 positions of entry 'x': 4 or 6 do",
    ),
}


def test_what_cannot_be_is_refused_in_words(pool: Pools, tmp_path: Path) -> None:
    def case() -> dict[str, str]:
        return {
            name: refused(folder_of(tmp_path, name.replace(" ", "-")), layout, build(), lines)
            for name, (layout, build, lines, _) in WRONG.items()
            if layout != "single"
        }

    ranks = pool(2).run(case, timeout=240)
    (alone,) = pool(1).run(lambda: refused(str(tmp_path / "s"), "single", model_of("tied"), WRONG["two ways"][2]))
    for name, (_, _, _, text) in WRONG.items():
        for found in [rank[name] for rank in ranks] if name != "two ways" else [alone]:
            assert text in found and "\n" not in found, (name, found)


def test_a_shift_is_refused_however_large_the_model_is(pool: Pools, tmp_path: Path) -> None:
    def case() -> tuple[str, str]:
        with patch.object(whole_check, "LARGEST_FLOPS", 0.0):
            lines = WRONG["a shift"][2]
            return (
                refused(str(tmp_path / "shift"), "cp=2", model_of("transformer"), lines),
                refused(str(tmp_path / "sum"), "cp=2", model_of("transformer"), run_and_step),
            )

    for shift, right in pool(2).run(case):
        assert "for whole ones of the same outputs" in shift and WRONG["a shift"][3] in shift
        assert right == "nothing was refused"
    decisions = [event for event in Run.open(tmp_path / "sum").events() if event["event"] == "decision"]
    assert [
        event["because"].partition(" for ")[2] for event in decisions if "sum over its 2 parts" in event["what"]
    ] == ["the first micro-batch"]


def test_a_loss_that_is_no_number_is_refused_where_it_is_computed(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        lines = lambda w, m, o, b: w.run(b, lambda output, _: output)  # noqa: E731
        return refused(str(tmp_path / "run"), "cp=2", model_of("transformer"), lines)

    for found in pool(2).run(case):
        assert found.startswith("TaskError: world.run(shape [2, 3, 11]): the loss has to be one number, the SUM")


def unlike(folder: str) -> str:
    """In a worker: two evaluations; rank 0 gives two functions, whose second is none of positions, and rank 1 one."""
    with allranks.join(layout="cp=2", run=folder) as world:
        world.parallelize(model_of("transformer"))

        def whole(output: Any, batch: Any, name: str = "exact") -> dict[str, tuple[Any, Any]]:
            return {name: (0, len(output))}

        second = partial(whole, name="exact") if world.rank == 0 else partial(words_metrics)

        def loop() -> None:
            for metrics in (partial(words_metrics), second):
                world.evaluate(Words(), metrics=metrics, batch=8)

        return refusal(loop)


def test_ranks_agree_on_whether_metrics_are_new(pool: Pools, tmp_path: Path) -> None:
    for found in pool(2).run(unlike, str(tmp_path / "run")):
        assert found.startswith("LayoutError: layout cp=2 does not measure what one process measures")


def test_the_code_of_metrics_is_that_of_what_is_bound() -> None:
    loop: Any = [lambda output, batch: {} for _ in range(2)]
    assert _code_of(loop[0]) is _code_of(loop[1]) is _code_of(partial(partial(loop[0]), 3))
    assert _code_of(partial(words_metrics)) is not _code_of(partial(loop[0]))


def test_values_that_were_loaded_after_spreading_are_not_compared(pool: Pools, tmp_path: Path) -> None:
    def case() -> None:
        with allranks.join(layout="cp=2", run=str(tmp_path / "run")) as world:
            model = world.parallelize(model_of("transformer"))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            optimizer = world.optimizer(model, sgd)
            for batch in world.stream(Words(), global_batch=BATCH, steps=2):
                run_and_step(world, model, optimizer, batch)

    pool(2).run(case)
    decisions = [event for event in Run.open(tmp_path / "run").events() if event["event"] == "decision"]
    assert [event["because"] for event in decisions if "not compared" in event["what"]] == [
        "its values are not those with which it was spread"
    ]


def floating(parts: Parts) -> Parts:
    return {name: part for name, part in parts.items() if part[1].is_floating_point()}


def of_copies(folder: str, layout: str, kind: str) -> list[RecordedStep]:
    return run_loop(folder, layout, kind, None, local_sgd=3).steps


@pytest.mark.parametrize(
    ("layout", "kind", "copies"),
    [
        ("dp_replicate=2,pp=2", "transformer", [[0, 2], [1, 3]]),
        pytest.param("dp_replicate=2,cp=2", "transformer", [[0, 1], [2, 3]], marks=pytest.mark.full),
        pytest.param("dp_replicate=2,tp=2", "moe", [[0, 1], [2, 3]], marks=pytest.mark.full),
    ],
)
def test_copies_by_themselves_whatever_is_inside(
    pool: Pools, tmp_path: Path, layout: str, kind: str, copies: list[list[int]]
) -> None:
    """Each is what one process trains by itself; that these are right is held in test_links."""
    alone = pool(2).run(of_copies, str(tmp_path / "alone"), "ddp", kind)
    ranks = pool(4).run(of_copies, str(tmp_path / "inside"), layout, kind)
    for members, steps in zip(copies, alone, strict=True):
        whole = [
            ReferenceStep(0.0, 0.0, *({name: part for name, (_, part) in parts.items()} for parts in both))
            for both in ((step.gradients, step.parameters, floating(step.buffers)) for step in steps)
        ]
        differences = compare([ranks[rank] for rank in members], whole)
        assert not differences, "; ".join(map(str, differences[:5]))


def test_what_the_loop_compiles_is_not_compiled_for_the_comparison(pool: Pools, tmp_path: Path) -> None:
    def case() -> list[int]:
        graphs: list[Any] = []
        counted: list[int] = []
        compare = Driven.compare

        def note(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        def count(driven: Driven, batch: Any, loss: Any) -> None:
            compare(driven, batch, loss)
            counted.append(len(graphs))

        compiled = torch.compile(lambda one: one * 1.0, backend=note)
        with (
            warnings.catch_warnings(),
            patch.object(Driven, "compare", count),
            allranks.join(layout="cp=2", run=str(tmp_path / "run")) as world,
        ):
            warnings.simplefilter("ignore")  # torch warns while it compiles
            optimizer = world.optimizer(world.parallelize(model_of("transformer")), sgd)
            for batch in world.stream(Words(), global_batch=BATCH, steps=1):
                world.run(batch, lambda output, own: compiled(words_loss(output, own)))
                world.step(optimizer)
        torch._dynamo.reset()
        return [*counted, len(graphs)]

    for before, after in pool(2).run(case):
        assert before == 0 < after
