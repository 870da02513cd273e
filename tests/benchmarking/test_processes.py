"""Both sides in real processes: every strategy trains the same thing by hand and by us; and nothing is left behind."""

import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from allranks.benchmarking import processes
from allranks.benchmarking.memory_watch import allocated_bytes
from allranks.benchmarking.processes import measure, measure_all
from allranks.benchmarking.strategies import Case, plan_cases, summarise
from allranks.errors import ProcessError
from allranks.layout import Layout
from allranks.parallel.backend import DeviceChoice
from allranks.process_environment import ProcessEnvironment

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


@pytest.mark.full
@pytest.mark.timeout(900)  # more than twenty strategies, beside other tests
def test_on_two_processes_both_sides_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    told: list[str] = []
    found = measure_all(plan_cases(None, [2]), 2, "tiny", tell=lambda case: told.append(case.strategy))
    assert told == [case.strategy for case in plan_cases(None, [2])] and len(told) > 20
    for row in summarise(found):
        assert row.loss_difference < 1e-6, row
        assert row.ratio is not None and row.turns == 2
        assert (row.of_ddp is not None) == (row.strategy == "fsdp"), "which alone takes turns with ddp"
        assert row.of_ddp is None or row.to_json()["of_ddp"] == row.of_ddp > 0
    assert not multiprocessing.active_children()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_on_four_processes_too() -> None:
    """Each axis once: more of the twins' products are in test_raw_context.py, test_raw_experts.py and so on."""
    strategies = ["dp_replicate=2,dp_shard=2", "tp=2,dp_shard=2", "pp=4", "cp=2,dp_shard=2", "dp_shard=4,ep=2"]
    found = measure_all(plan_cases(strategies, [4]), 2, "tiny")
    assert all(row.loss_difference < 1e-6 for row in summarise(found))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_compiled_too() -> None:
    (row,) = summarise(measure_all(plan_cases(["ddp,compile=block"], [2]), 2, "tiny"))
    assert row.loss_difference < 1e-6


@pytest.mark.full
def test_a_case_that_fails_is_named_and_all_processes_end() -> None:
    case = Case("tp=3", Layout(tp=3))  # of four heads
    with pytest.raises(ProcessError, match=r"tp=3 on 3 processes could not be measured: .*"):
        measure_all([case], 2, "tiny")
    assert not multiprocessing.active_children()


def test_a_case_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CASE_SECONDS", 0.5)
    with pytest.raises(ProcessError, match=r"ddp on 2 processes could not be measured: no end after 0 s"):
        measure_all(plan_cases(["ddp"], [2]), 2, "tiny")
    assert not multiprocessing.active_children()


@pytest.mark.skipif(allocated_bytes() == 0, reason="this system does not tell what is allocated")
@pytest.mark.sample(4)
@pytest.mark.parametrize("grows", [2, 3, 4, 5])
def test_a_table_that_grows_meanwhile_is_in_nobodys_memory(monkeypatch: pytest.MonkeyPatch, grows: int) -> None:
    table, made = [], 0

    def loop(*_: object) -> Iterator[Callable[[], float]]:
        nonlocal made
        if made == grows:
            table.append(torch.ones(1_000_000))  # stays, as a table of the interpreter does
        made += 1
        while True:
            kept = torch.ones(1_000_000)
            yield partial(float, kept[0])

    monkeypatch.setattr(processes, "raw_steps", loop)
    monkeypatch.setattr(processes, "our_steps", loop)
    alone = ProcessEnvironment("environment", 0, 0, 1, 1)
    found = measure(Case("single", Layout()), 2, "tiny", alone, DeviceChoice(torch.device("cpu"), "gloo", None, ()))
    assert table and all(3.9e6 < peak < 8.1e6 for peak in found.memory), found.memory
    assert abs(found.memory[0] - found.memory[1]) < 0.2e6
