from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.fault_points import Fault, Fired
from allranks.surviving.incidents import Incident, final_lines, read_incidents
from allranks.surviving.trial_commands import Command

KILL = Fault(0, "forward", 1, 8, 1, "kill")
FIRED = Fired(0, 100.0, 7, 8)
CAUSE = "restart 1, after step 7: rank 1 on h was killed by SIGKILL"
RESTART = {"t": 100.2, "event": "verdict", "kind": "restart", "what": CAUSE}


def event(t: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": kind, **fields}


def steps(first: int, last: int, t: float) -> list[dict[str, Any]]:
    return [event(t + 0.01 * step, "step", step=step) for step in range(first, last + 1)]


BEFORE = [event(90.0, "start"), *steps(1, 7, 91.0)]
AFTER = [event(100.5, "start"), event(100.6, "resume", step=5), *steps(6, 9, 101.0)]


def read(events: Sequence[Any], commands: Sequence[Command] = (), fault: Fault = KILL) -> Incident:
    (found,) = read_incidents([fault], {0: FIRED}, events, commands)
    return found


def command(folder: Path, code: int, text: str) -> Command:
    log = folder / "log"
    log.write_text(text)
    return Command(80.0, 100.3, code, log)


def test_workers_that_were_started_again() -> None:
    found = read([*BEFORE, RESTART, *AFTER])
    assert found == Incident(KILL, "restarted", (CAUSE,), 5, 2, 1.06)
    assert found.recovered and found.names_rank()


def test_a_restart_behind_a_spike_is_no_cause() -> None:
    back = [{**RESTART, "t": 101.8, "kind": "rollback"}, {**RESTART, "t": 101.9}]
    found = read([*BEFORE, RESTART, *AFTER, *back, event(102.0, "start"), *steps(6, 9, 103.0)])
    assert found.causes == (CAUSE,) and found.names_rank()
    # Of a spike that is only told of nothing follows, and one restart behind another is a fault's.
    told = {**RESTART, "t": 101.8, "kind": "spike"}
    for some, causes in (([told, {**RESTART, "t": 101.9}], 2), ([*back, {**RESTART, "t": 102.0}], 2)):
        assert len(read([*BEFORE, RESTART, *AFTER, *some, event(102.1, "start")]).causes) == causes


def test_a_start_from_the_beginning() -> None:
    found = read([*BEFORE, RESTART, event(100.5, "start"), *steps(1, 3, 101.0)])
    assert (found.resumed_step, found.redone, found.seconds) == (0, 7, 1.01)


def test_the_fault_knows_of_a_step_whose_line_was_lost() -> None:
    late = replace(FIRED, step=10)
    (found,) = read_incidents([KILL], {0: late}, [*BEFORE, RESTART, *AFTER], ())
    assert found.redone == 4


def test_a_run_that_ended_and_was_resumed(tmp_path: Path) -> None:
    ended = command(tmp_path, 1, "step 3\nrank 1 on h failed:\nTraceback\nRuntimeError: chaos\n")
    found = read([*BEFORE, *AFTER], [ended], replace(KILL, kind="raise"))
    assert (found.recovery, found.causes) == ("resumed", ("rank 1 on h failed: RuntimeError: chaos",))
    assert found.recovered and found.names_rank()
    assert not read([*BEFORE, *AFTER], [ended]).recovered  # a kill is the supervisor's to recover from


def test_nothing_followed(tmp_path: Path) -> None:
    found = read(BEFORE, [command(tmp_path, 93, "no word\n")])
    assert (found.recovery, found.recovered, found.seconds) == ("none", False, None)


def test_a_fault_that_ends_nothing() -> None:
    fault = replace(KILL, kind="eio")
    found = read([*BEFORE, *steps(8, 9, 101.0)], fault=fault)
    assert found.recovery == "went on" and found.recovered
    assert not read([*BEFORE, *steps(8, 9, 101.0)]).recovered  # a process that was killed cannot go on


def test_a_fault_before_the_next_step_leaves_no_time() -> None:
    second = Fault(1, "resume", 0, 8, 1, "kill", after=0)
    again = {**RESTART, "t": 101.7, "what": "restart 2, after step 7: rank 0 on h was killed by SIGKILL"}
    events = [*BEFORE, RESTART, event(100.5, "start"), event(100.6, "resume", step=5), again]
    events += [event(102.0, "start"), event(102.1, "resume", step=5), *steps(6, 9, 103.0)]
    first, last = read_incidents([KILL, second], {0: FIRED, 1: Fired(1, 101.5, 9, 5)}, events, ())
    assert (first.recovery, first.seconds, first.causes) == ("restarted", None, (CAUSE,))
    assert (last.recovery, last.seconds) == ("restarted", 1.56) and last.names_rank()


def test_two_ranks_that_are_lost_at_the_same_time_have_one_restart() -> None:
    """One in a step, one in its thread that saves: the supervisor names who was lost first, and starts all again."""
    second = Fault(1, "checkpoint.renamed", 0, 6, 1, "kill")
    fired = {0: FIRED, 1: Fired(1, 100.1, 9, 6)}
    found = read_incidents([KILL, second], fired, [*BEFORE, RESTART, *AFTER], ())
    assert [(one.recovery, one.causes, one.resumed_step, one.redone) for one in found] == [
        ("restarted", (CAUSE,), 5, 2)
    ] * 2
    assert [one.beside for one in found] == [(0,), (1,)] and all(one.recovered and one.names_rank() for one in found)
    assert [one.seconds for one in found] == [1.06, 0.96]
    # A restart between them is the first one's, and one that does not restart is nobody's company.
    (first, last) = read_incidents([KILL, second], {**fired, 1: Fired(1, 100.3, 9, 6)}, [*BEFORE, RESTART, *AFTER], ())
    assert (first.recovery, last.recovery, first.beside, last.beside) == ("restarted", "went on", (), ())
    disk = replace(second, kind="enospc")
    assert [one.beside for one in read_incidents([KILL, disk], fired, [*BEFORE, RESTART, *AFTER], ())] == [(), ()]


def test_two_saves_that_fail_between_two_steps_are_both_gone_on_from() -> None:
    """One in the thread that saves, one in the copy at the next step; the run is started again later, for a third."""
    faults = [Fault(0, "checkpoint.renamed", 0, 5, 1, "raise"), Fault(1, "background.copy", 1, 7, 1, "raise")]
    fired = {0: FIRED, 1: Fired(1, 100.001, 9, 7)}
    events = [*BEFORE, *steps(8, 9, 101.0), event(102.0, "end"), event(110.0, "start"), *steps(6, 9, 111.0)]
    assert [one.recovery for one in read_incidents(faults, fired, events, ())] == ["went on", "went on"]
    first, _ = read_incidents(faults, fired, [*BEFORE, event(110.0, "start"), *steps(6, 9, 111.0)], ())
    assert first.recovery == "none", "no step before the next start"


@pytest.mark.parametrize("causes", [(), (CAUSE, CAUSE), ("restart 1: rank 11 on h was killed",)])
def test_a_cause_is_one_line_with_the_rank(causes: tuple[str, ...]) -> None:
    assert not Incident(KILL, "restarted", causes, 5, 2, 1.0).names_rank()


def test_of_a_connection_any_end_may_be_named_and_the_last_one_is_not_missed() -> None:
    cut = replace(KILL, kind="disconnect", rank=0)
    assert Incident(cut, "restarted", ("restart 1: rank 1 on h: Connection closed by peer",), 5, 2, 1.0).names_rank()
    assert not Incident(cut, "restarted", ("restart 1: Connection closed by peer",), 5, 2, 1.0).names_rank()
    assert Incident(cut, "went on", (), None, 0, None).recovered
    assert not Incident(cut, "resumed", ("rank 1: x",), 5, 2, 1.0).recovered, "the supervisor starts again"


def test_final_lines() -> None:
    assert final_lines(["rank 0 on h: no space", "bye"]) == ["rank 0 on h: no space"]
    assert final_lines(["the rank 0 on h"]) == []
