"""What the kernel tells of a process."""

import os
from pathlib import Path

import pytest

from allranks.surviving import kernel
from allranks.surviving.kernel import core_seconds, is_frozen, is_held_dead, process_state, waits_in

NOBODY = 2**22 + 1


def test_the_kernel_tells_who_waits_for_a_core() -> None:
    found = core_seconds(os.getpid())
    assert found is not None and min(found) > 0.0
    assert core_seconds(NOBODY) is None


def test_the_state_of_a_process_that_is_gone() -> None:
    assert process_state(os.getpid()) == "R"
    assert process_state(NOBODY) == waits_in(NOBODY) == ""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up kernel, with process 7."""
    monkeypatch.setattr(kernel, "PROCESSES", tmp_path / "proc")
    monkeypatch.setattr(kernel, "GROUPS", tmp_path / "groups")
    (tmp_path / "proc/7").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("tracer", "threads", "held"), [("9", "ZZ", True), ("0", "ZZ", False), ("9", "ZD", False), ("9", "tt", False)]
)
def test_whether_a_debugger_holds_the_dead(tree: Path, tracer: str, threads: str, held: bool) -> None:
    (tree / "proc/7/status").write_text(f"State:\tZ (zombie)\nTracerPid:\t{tracer}\n")
    for pid, state in zip((7, 8), threads, strict=True):
        (tree / f"proc/7/task/{pid}").mkdir(parents=True)
        (tree / f"proc/{pid}").mkdir(exist_ok=True)
        (tree / f"proc/{pid}/stat").write_text(f"{pid} (python) {state} 1 2 3")
    assert is_held_dead(7) == held


def test_nobody_is_not_held() -> None:
    assert not is_held_dead(NOBODY) and not is_held_dead(os.getpid())


def test_where_a_process_waits(tree: Path) -> None:
    (tree / "proc/7/stat").write_text("7 (a (name) of sorts) D 1 2 3")
    (tree / "proc/7/wchan").write_text("rpc_wait_bit_killable")
    assert (process_state(7), waits_in(7)) == ("D", "rpc_wait_bit_killable")
    (tree / "proc/7/wchan").write_text("0")
    assert waits_in(7) == ""


@pytest.mark.parametrize(
    ("line", "file", "yes", "no"),
    [
        ("0::/box", "box/cgroup.events", "populated 1\nfrozen 1\n", "populated 1\nfrozen 0\n"),
        ("5:freezer:/box", "freezer/box/freezer.state", "FROZEN\n", "THAWED\n"),
    ],
)
def test_a_paused_container_is_frozen(tree: Path, line: str, file: str, yes: str, no: str) -> None:
    assert not is_frozen(7), "the system does not tell"
    (tree / "proc/7/cgroup").write_text(f"4:memory:/box\n{line}\n")
    assert not is_frozen(7)
    path = tree / "groups" / file
    path.parent.mkdir(parents=True)
    for text, frozen in ((yes, True), (no, False)):
        path.write_text(text)
        assert is_frozen(7) == frozen
