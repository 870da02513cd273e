"""What a Task may ask of the other ranks, and what it finds where there are none."""

import torch

from allranks.task import Task
from allranks.task_world import Alone, rows_of
from tests.distributed.tasks import Tiny


def test_alone_a_tasks_rows_are_all_there_are() -> None:
    rows = torch.arange(3.0)
    assert Tiny().world.gather(rows) is rows
    assert Tiny().world.offset(rows) == 0


class Doubled:
    """Two ranks with the same rows."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows])

    def offset(self, rows: torch.Tensor) -> int:
        return len(rows)


def test_inside_it_asks_whom_it_is_told_to() -> None:
    rows, alone = torch.arange(3.0), Alone()
    with rows_of(Doubled()):
        assert Task.world.gather(rows).tolist() == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]
        assert Task.world.offset(rows) == 3
        with rows_of(alone):
            assert Task.world.offset(rows) == 0
            asked = [alone.asked]
            assert Task.world.gather(rows) is rows
            assert [*asked, alone.asked] == [False, True]
        assert Task.world.offset(rows) == 3
    assert Task.world.offset(rows) == 0
