"""An own loop as a value: what each rank is fed, and files that are no own loop."""

from types import ModuleType
from typing import Any

import pytest
import torch

from allranks.errors import DataError, TaskError
from allranks.verifying.program import Program, cut, in_order, merge, order_of, program_of, reported, shuffled


def program(data: Any, **more: Any) -> Program:
    return Program(lambda distributed: (None, None), lambda model, optimizer, batches: 0.0, data, **more)


def test_a_list_of_global_batches_is_cut_over_the_ranks() -> None:
    data = [{"x": torch.arange(5), "k": 3}]
    shares = [next(program(data).steps(rank, 2)) for rank in range(2)]
    assert [share[0]["x"].tolist() for share in shares] == [[0, 1, 2], [3, 4]]
    assert shares[0][0]["k"] == 3
    (step,) = program(data, micro_batches=2).steps(0, 1)
    assert [batch["x"].tolist() for batch in step] == [[0, 1, 2], [3, 4]]


def test_a_function_says_itself_what_a_rank_gets() -> None:
    found = program(lambda rank, size: [[(rank, size)]])
    assert list(found.steps(1, 2)) == [[(1, 2)]]
    with pytest.raises(DataError, match=r"a step of data.* is a Tensor: give a list of batches"):
        list(program(lambda rank, size: [torch.ones(3)]).steps(0, 1))
    with pytest.raises(DataError, match="data is a Tensor: give one entry for each step"):
        list(program(torch.ones(3)).steps(0, 1))
    with pytest.raises(DataError, match=r"tensors of lengths \[2, 3\]"):
        list(program([(torch.ones(3), torch.ones(2))]).steps(0, 2))


def test_micro_batches_become_one_batch_where_they_fit() -> None:
    batch = (torch.arange(6).reshape(6, 1), torch.arange(6))
    parts = cut(batch, 4)
    assert [len(part[0]) for part in parts] == [2, 2, 1, 1]
    whole = merge(parts)
    assert whole is not None and torch.equal(whole[0], batch[0]) and torch.equal(whole[1], batch[1])
    assert merge([(torch.ones(2, 3),), (torch.ones(2, 4),)]) is None
    assert merge([{"a": torch.ones(2)}, (torch.ones(2),)]) is None


def test_a_process_may_report_nothing() -> None:
    assert reported(None, "evaluate") == {} and reported({1: 2.0}, "evaluate") == {"1": 2.0}
    with pytest.raises(TaskError, match=r"state returns a float: return \{name: value\}, or None on a rank"):
        reported(0.5, "state")


def test_evaluation_is_cut_too() -> None:
    found = program([], validation=torch.arange(5))
    assert [batch.tolist() for batch in found.evaluation_batches(1, 2)] == [[3, 4]]
    assert program([]).evaluation_batches(0, 1) == []
    assert program([], validation=lambda rank, size: [rank]).evaluation_batches(1, 2) == [1]


def module(**names: Any) -> ModuleType:
    made = ModuleType("own")
    vars(made).update(names)
    return made


RIGHT: dict[str, Any] = {"build": lambda d: (0, 0), "step": lambda m, o, b: 0, "data": []}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"build": RIGHT["build"]}, "own.py defines no step and no data"),
        (RIGHT | {"step": 3}, "step in own.py is a int: expected a function"),
        (RIGHT | {"step": lambda m: 0}, r"step in own.py cannot be called as step\(model, optimizer, batches\)"),
        (RIGHT | {"build": lambda: 0}, r"build in own.py cannot be called as build\(distributed\)"),
        (RIGHT | {"save": lambda m, o, f: 0}, "defines only one of save and load"),
    ],
)
def test_what_is_missing_is_said(names: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        program_of(module(**names), "own.py")
    assert program_of(module(**RIGHT), "own.py").data == []


def test_a_program_may_skip_by_itself() -> None:
    def skipping(rank: int, world_size: int, first_step: int) -> Any:
        return [[torch.tensor([float(step)])] for step in range(first_step, 4)]

    def whole(rank: int, world_size: int) -> Any:
        return skipping(rank, world_size, 0)

    for data in (skipping, whole, [torch.tensor([float(step)]) for step in range(4)]):
        found = program(data).steps(0, 1, 2)
        assert [float(batches[0]) for batches in found] == [2.0, 3.0]


def test_a_third_argument_of_the_programs_own_is_left_to_it() -> None:
    """Its seed was set to the number of steps that were done."""

    def seeded(rank: int, world_size: int, seed: int = 5) -> Any:
        return [[torch.tensor([float(10 * seed + step)])] for step in range(4)]

    def named(rank: int, world_size: int, first_step: int = 0) -> Any:
        return [[torch.tensor([50.0 + step])] for step in range(first_step, 4)]

    def several(*arguments: int) -> Any:
        return named(*arguments)

    for data in (seeded, named, several):
        found = program(data).steps(0, 1, 2)
        assert [float(batches[0]) for batches in found] == [52.0, 53.0]


def test_rows_follow_their_samples() -> None:
    batch, rows = (torch.arange(5), torch.ones(5, 2)), [10, 11, 12, 13, 14]
    order = order_of(batch, 3)
    assert in_order(rows, order) == [10 + int(x) for x in shuffled(batch, 3)[0]] != rows
    assert order_of((torch.ones(2), torch.ones(3)), 3) is None
    assert in_order(rows, None) == rows and in_order([7], order) == [7]


def test_a_step_with_fewer_samples_than_processes_is_told() -> None:
    few = program([torch.ones(4, 2), torch.ones(1, 2)])
    assert few.too_small(2, 2) == "step 1 of data has 1 sample, for 2 processes: some have none"
    assert few.too_small(2, 8) == "step 0 of data has 4 samples, for 8 processes: some have none"
    assert few.too_small(1, 4) == "" == program(lambda rank, size: [[]]).too_small(2, 2)


def test_a_step_of_a_function_that_leaves_a_rank_out_is_told() -> None:
    """By no batch, by one of no rows, by an end that comes too early; not where one device has nothing either."""
    some, none = [(torch.ones(2, 3), torch.ones(2))], [(torch.ones(0, 3), torch.ones(0))]

    def gives(*last: Any) -> Program:
        return program(lambda rank, size: [some, *(last if rank == size - 1 and size > 1 else (some,))])

    told = "step 1 of data has samples, but none for rank 1 of 2 processes"
    assert gives([]).leaves_out(2, 2) == gives(none).leaves_out(2, 2) == gives().leaves_out(2, 2) == told
    assert gives([*none, *some]).leaves_out(2, 2) == gives([]).leaves_out(1, 2) == gives([]).leaves_out(2, 1) == ""
    assert program(lambda rank, size: [[]] * 2).leaves_out(2, 2) == ""
    alone = program(lambda rank, size: [some if rank == 0 else []])
    assert alone.leaves_out(1, 4) == "step 0 of data has samples, but none for rank 1, 2, 3 of 4 processes"
