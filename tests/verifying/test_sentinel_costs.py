"""What the sentinels cost: how looks and rounds are charged; and a real training, timed."""

from pathlib import Path

import pytest

from allranks.request import TrainRequest
from allranks.surviving.launch import launch
from allranks.training.comparing import Comparing
from allranks.verifying.sentinel_costs import FEWEST, WARM_ROUNDS, Costs, charged, costs_of_rank, share
from tests.commands import POINTS

EVERY = 3


def costs_of(steps: int, *, rounds: bool = True) -> Costs:
    """Steps of 1 s; looks of 1 ms, of 3 ms in a step with a round of 0.4 s; by the processor half of everything."""
    costs = Costs(EVERY)
    for step in range(steps):
        costs.begins.append((float(step), step / 2))
        due = rounds and step % EVERY == EVERY - 1
        costs.looks[step] = (0.003, 0.0015) if due else (0.001, 0.0005)
        if due:
            costs.rounds[step] = (0.4, 0.2)
    return costs


def test_a_step_is_charged_a_look_and_its_part_of_a_round() -> None:
    row = costs_of((WARM_ROUNDS + 2) * EVERY + 1).row()
    assert row is not None and (row["steps"], row["rounds"]) == (4, 2)
    assert charged(row) == pytest.approx(0.001 + (0.4 + 0.002) / 200)
    assert share(row) == pytest.approx(0.00301) == share(row, "processor_seconds")


def test_without_rounds_a_look_is_charged_alone_and_of_few_steps_nothing_is_said() -> None:
    row = costs_of((WARM_ROUNDS + 2) * EVERY + 1, rounds=False).row()
    assert row is not None and share(row) == pytest.approx(0.001)
    assert costs_of(WARM_ROUNDS * EVERY + FEWEST, rounds=False).row() is None


def test_calls_of_one_step_are_added_up_and_one_that_raises_counts() -> None:
    costs = Costs(EVERY)
    costs.begins.append((0.0, 0.0))

    def fail() -> None:
        raise ValueError

    timed = costs.around(fail, costs.looks)
    for _ in range(2):
        before = costs.looks.get(0, (0.0, 0.0))[0]
        with pytest.raises(ValueError):
            timed()
        assert costs.looks[0][0] > before


@pytest.mark.full
@pytest.mark.distributed
def test_the_sentinels_of_a_real_training_are_timed(tmp_path: Path) -> None:
    words = ("train.steps=12", "guard.digest_every=3", "evaluate.every=0", "train.global_batch=8", "task.pause=0.005")
    request = TrainRequest(task_spec=POINTS, layout="ddp", nproc=2, device="cpu", overrides=words)
    compare = Comparing.compare
    for row in launch(costs_of_rank, request, nproc=2):
        assert row is not None and row["rounds"] >= 1 and row["steps"] >= FEWEST
        assert row["look_seconds"] > 0 and row["round_seconds"] > 0 and 0 < share(row) < 1
        assert row["step_seconds"] > 0.005
    assert Comparing.compare is compare
