"""What is run to verify a Task: layouts that are refused, how a step is cut, and what is told of it."""

import pytest

from allranks.data.cut import cut_step
from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout
from allranks.request import TrainRequest
from allranks.training.prepare import prepare
from allranks.verifying.plan import cut_words, notes_of, plan_run, unlike_any_degree
from tests.commands import POINTS, PROGRAMS

GAN = str(PROGRAMS.parents[1] / "corpus" / "task_gan.py")


def test_float8_is_said_not_to_be_compared() -> None:
    def notes(precision: str) -> str:
        request = TrainRequest(task_spec=POINTS, layout="fsdp", nproc=2, overrides=(f"train.precision={precision}",))
        return " ".join(notes_of(plan_run(request, 2), 1))

    assert "not compared in float8, because each process scales by" in notes("float8")
    assert "not compared" not in notes("bfloat16") + notes("float32")


def test_float16_with_a_step_of_its_own_is_refused_at_once() -> None:
    request = TrainRequest(task_spec=GAN, layout="ddp", nproc=2, overrides=("train.precision=float16",))
    with pytest.raises(ConfigError, match="verify it in bfloat16"):
        plan_run(request, 4)


def test_the_batch_is_small_and_uneven() -> None:
    plan = plan_run(TrainRequest(task_spec=POINTS, layout="ddp", nproc=3), 4)
    assert {"train.precision=float64", "train.global_batch=13", "train.micro_steps=2"} <= set(plan.request.overrides)


def test_a_layout_that_no_smaller_one_mends_is_refused_for_its_modes() -> None:
    with pytest.raises(LayoutError, match=r"^schedule=zbv runs the halves of a backward apart"):
        plan_run(TrainRequest(task_spec=POINTS, layout="dp_shard=4,pp=4,schedule=zbv"), 4)
    request = TrainRequest(task_spec=POINTS, layout="ddp", nproc=16, overrides=("layout.local_sgd=2",))
    with pytest.raises(LayoutError, match=r"^layout\.local_sgd=2: computes something else"):
        plan_run(request, 4)


@pytest.mark.parametrize(
    ("layout", "nproc", "cut", "micro_steps"),
    [
        ("ddp", 2, "train.micro_batch=2", 3),
        ("ddp", 4, "train.micro_batch=2", 3),
        ("pp=2", 2, "train.micro_batch=2", 4),
        ("pp=2,dp_shard=2", 4, "train.micro_batch=2", 4),
    ],
)
def test_the_micro_batch_of_larger_steps_is_made_smaller_with_them(
    layout: str, nproc: int, cut: str, micro_steps: int
) -> None:
    words = ("train.global_batch=64", "train.micro_batch=16")
    plan = plan_run(TrainRequest(task_spec=POINTS, layout=layout, nproc=nproc, overrides=words), 4)
    assert plan.request.overrides[-2:] == (cut, "train.precision=float64") and plan.config.train.global_batch < 20
    assert cut_step(plan.config.train, plan.layout).num_micro_steps() == micro_steps


def test_ranges_that_a_rollback_left_out_are_not_those_of_a_smaller_batch() -> None:
    words = ("train.global_batch=64", "data.skip=64:128")
    plan = plan_run(TrainRequest(task_spec=POINTS, layout="ddp", nproc=2, overrides=words), 4)
    assert plan.config.data.skip == "" and plan.config.train.global_batch < 64


@pytest.mark.parametrize(
    ("layout", "micro_steps"),
    [
        (Layout(dp_replicate=2), 3),
        (Layout(dp_replicate=3), 2),
        (Layout(dp_replicate=4), 3),  # a factor of 4 is not two micro-steps counted twice
        (Layout(dp_replicate=2, dp_shard=2), 3),
        (Layout(dp_shard=2, tp=2), 3),
        (Layout(tp=2), 3),
        (Layout(dp_shard=3, tp=2), 5),
    ],
)
def test_micro_steps_are_no_degree(layout: Layout, micro_steps: int) -> None:
    assert unlike_any_degree(layout) == micro_steps


def test_a_step_of_two_axes_is_cut_otherwise_than_by_one_of_them() -> None:
    plan = plan_run(TrainRequest(task_spec=POINTS, layout="dp_replicate=2,dp_shard=2"), 4)
    assert cut_step(plan.config.train, plan.layout).num_micro_steps() == 3


@pytest.mark.parametrize(("batch", "micro_steps"), [(32, 5), (4, 2)])
def test_a_step_is_cut_although_its_degrees_leave_few_numbers(batch: int, micro_steps: int) -> None:
    """Of 2, 3 and 6 and their squares none may be its number of micro-steps, where the batch has as many samples."""
    prepared = prepare(TrainRequest(task_spec=POINTS, overrides=(f"train.global_batch={batch}",)))
    assert f"train.micro_steps={micro_steps}" in cut_words(prepared.task, prepared.config, Layout(tp=3, cp=2))


def test_what_is_left_out_is_told() -> None:
    def notes(layout: str, *words: str, validation: int = 0) -> str:
        plan = plan_run(TrainRequest(task_spec=POINTS, layout=layout, nproc=2, overrides=words), 4)
        assert plan.config.data.workers == 0
        return "\n".join(notes_of(plan, 2, validation))

    assert "data.workers=3 is left out: every process" in notes("ddp", "data.workers=3")
    assert "the first 61 of 10000 validation samples" in notes("ddp", validation=10000)
    assert "where modules lie is not verified" in notes("placement,dp_replicate=2")
    plain = notes("ddp")
    assert "left out" not in plain and "validation samples" not in plain and "where modules" not in plain
