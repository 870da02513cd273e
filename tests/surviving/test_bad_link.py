"""What a host tells of the ways that its workers found bad; tests/cli/test_running_on_a_network.py has real ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.observing.bad_links import Finding, findings_file, write_findings
from allranks.observing.heartbeat import Heartbeat
from allranks.surviving.bad_link import BadLink
from allranks.surviving.beats import SharedBeats
from allranks.verdict import Verdict
from tests.surviving.rows import row

HERE, THERE, OTHER = "10.0.0.1", "10.0.0.2", "10.0.0.3"
LOST = Finding(HERE, THERE, "lost", "5.0% of what was sent was lost, and sent again", "the figures")
FAR = Finding(HERE, THERE, "far", "a round trip takes 52 ms at best", "the figures")


class Host:
    """Two workers, which find what a test says."""

    def __init__(self, beats: SharedBeats, logs: Path) -> None:
        self.beats, self.logs, self.watch = beats, logs, BadLink(beats, logs)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.beats.clear()
        self.watch.begin_attempt()

    def find(self, rank: int, *findings: Finding) -> None:
        write_findings(findings_file(self.logs / f"rank-{rank:05d}.log"), findings)
        Heartbeat(self.beats.slot(rank)).found_bad_links(len(findings))

    def look(self) -> Verdict | None:
        return self.watch.look([row(rank) for rank in range(2)], {0: 0, 1: 1})


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    beats = SharedBeats(2)
    yield Host(beats, tmp_path)
    beats.close()


def test_what_two_workers_find_is_told_once(host: Host) -> None:
    assert host.look() is None
    host.find(0, LOST)
    host.find(1, LOST)
    found = host.look()
    assert found is not None and found.kind == "network" and found.evidence == ("the figures",)
    assert found.what == f"the network is bad from {HERE} to {THERE}: 5.0% of what was sent was lost, and sent again"
    assert host.look() is None
    host.begin_attempt()
    assert host.look() is None
    host.find(0, LOST)
    assert host.look() is None, "nor in another attempt"


def test_what_an_attempt_or_another_command_has_left_is_not_told(host: Host) -> None:
    write_findings(findings_file(host.logs / "rank-00000.log"), [LOST])
    assert host.look() is None, "the worker has said nothing of it"


def test_what_is_found_later_of_the_same_way_is_told(host: Host) -> None:
    host.find(0, FAR)
    host.look()
    host.find(0, FAR, LOST)
    found = host.look()
    assert found is not None and found.what.endswith("5.0% of what was sent was lost, and sent again")


def test_what_is_found_together_is_one_verdict(host: Host) -> None:
    host.find(1, LOST, FAR, Finding(HERE, OTHER, "slow", "it is slow", "other figures"))
    found = host.look()
    assert found is not None
    words = f"from {HERE} to {THERE}: 5.0% of what was sent was lost, and sent again; a round trip takes 52 ms at best"
    assert found.what == f"the network is bad {words} (2 ways in all)"
    assert found.evidence == ("the figures", f"from {HERE} to {OTHER}: it is slow")
