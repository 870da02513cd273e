"""What hosts say of their workers, and what all of it says together."""

import json

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.surviving import evidence
from allranks.surviving.evidence import SHOWN_FRAMES, Frame
from allranks.surviving.hang import Absentee
from allranks.surviving.hosts.statement import Statement, find_absent, find_alarm, gather
from allranks.surviving.hosts.table import Table
from tests.surviving.rows import collective, row, witness

GUARD = GuardConfig(hang_seconds=15.0)
MEMBERS = (_NodeDesc("a", 8, 0), _NodeDesc("b", 9, 0))
TABLE = Table(1, MEMBERS, "", 0, (1, 2))


def test_it_is_the_same_on_another_host_and_has_its_name() -> None:
    said = Statement((witness(1, collective(12)), witness(2, phase="input")), (2,), 1.5)
    heard = Statement.from_json(json.loads(json.dumps(said.to_json())), "b")
    assert (heard.stopped, heard.delayed_seconds) == ((2,), 1.5)
    assert [one.host for one in heard.found] == ["b", "b"]
    assert [(one.row, one.stack, one.collectives) for one in heard.found] == [
        (one.row, one.stack, one.collectives) for one in said.found
    ]


def test_of_a_deep_stack_goes_what_a_verdict_shows() -> None:
    torchs = tuple(Frame(json.__file__, line, "loads") for line in range(50))
    deep = evidence.Testimony(row(1), (*torchs, Frame("/home/me/task.py", 31, "loss")))
    heard = evidence.Testimony.from_json(deep.to_json(), "b")
    assert heard.stack == (*torchs[:SHOWN_FRAMES], deep.stack[-1]) and heard.place == deep.place


def test_what_one_host_does_excuses_who_waits_on_another() -> None:
    waits = Statement((witness(0, collective(12)),))
    assert find_alarm(gather([waits, None]), [waits, None], GUARD) is not None
    for phase in ("checkpoint", "input"):
        other = Statement((witness(1, phase=phase),))
        alarm = find_alarm(gather([waits, other]), [waits, other], GUARD)
        assert (
            alarm is None if phase == "checkpoint" else alarm is not None and (alarm.ranks, alarm.act) == ((1,), False)
        )
    starved = Statement((witness(1, quiet_seconds=10.0),), delayed_seconds=10.0)
    assert find_alarm(gather([waits, starved]), [waits, starved], GUARD) is None, "rank 1 had no core for 10 s"


def test_a_save_on_one_host_is_told_of_on_all() -> None:
    waits, saves = (
        Statement((witness(0, collective(12)),)),
        Statement((witness(1, phase="checkpoint", quiet_seconds=40.0),)),
    )
    alarm = find_alarm(gather([waits, saves]), [waits, saves], GUARD)
    assert alarm is not None and (alarm.kind, alarm.ranks, alarm.phase) == ("slow", (1,), "checkpoint")


def test_who_is_stopped_anywhere_is_the_alarm() -> None:
    fine, stopped = Statement((witness(0, quiet_seconds=1.0),)), Statement((witness(1, state="T"),), (1,))
    alarm = find_alarm(gather([fine, stopped]), [fine, stopped], GUARD)
    assert alarm is not None and (alarm.kind, alarm.ranks, alarm.act) == ("stopped", (1,), True)


def test_of_whom_nobody_testifies() -> None:
    waits = Statement((witness(0, collective(12)),))
    assert find_absent(TABLE, [waits, Statement((witness(2),))]) == {1: Absentee("b", 9, ended=True)}
    assert find_absent(TABLE, [waits, None]) == {rank: Absentee("b", 9, ended=False) for rank in (1, 2)}
