"""What hosts tell each other besides the state of the rendezvous: sealed JSON, each under a key of its own.

run                        what all hosts have to have alike, and where the Run directory is     (by the leader)
planning                   which host plans the layout, before there is a Run directory          (by the leader)
heirs                      [host, pid] of all who have led, or were about to                     (by the leader)
workers/NODE               how many workers a host has, while it waits as well
member/ROUND/NUMBER        a host's number of workers, and its addresses
meet/ROUND                 the attempt, the workers' store, the hosts' order, workers and addresses, the spares; or
                           why they are too few                                                 (by the leader)
spares/ROUND               hosts that wait beside it, and that it has no use for                (by the leader)
door/ROUND/PLACE           where a host listens for a moment, in a first round (Door)
row/ROUND/PLACE            which of these it does not reach, and why
inquiry/ROUND              something is wrong: the number of the question what (hearing.py)
statement/ROUND/NUMBER/PLACE  where a host's workers stand (Statement)
ruling/ROUND               what that means, for all (Ruling)                                     (by the leader)
objection/ROUND            the number of a ruling since which the run has gone on
trouble/ROUND              workers of a host have failed
report/ROUND/PLACE         how a host's workers ended (Report)
again/ROUND                all workers have saved and ended, and start again                     (by the leader)
left                       [host, pid] of who led last and has left, asked to stop              (by the leader)
ending                     how the run ended, for all (Ending); the first word holds
bye/NODE                   a host that leaves has read that
"""

import os
import socket
import time
from collections.abc import Sequence
from typing import final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.ending import Ending, Report
from allranks.surviving.hosts.place import MeetingPlace
from allranks.surviving.hosts.seal import Json, Seal
from allranks.surviving.hosts.table import key_of


@final
class Notices:
    """A board in the meeting place. Every method raises StoreLostError, and SealError for what no host has written."""

    def __init__(self, meeting: MeetingPlace, seal: Seal) -> None:
        self._meeting = meeting
        self._seal = seal

    def post(self, key: str, value: Json) -> None:
        """Put it up; what stood under `key` goes."""
        self._meeting.write(key, self._seal.close(key, value))

    def replace(self, key: str, before: Json | None, value: Json) -> None:
        """Put it up where `before` still stands (None: nothing); who was faster is not written over."""
        expected = "" if before is None else self._seal.close(key, before)
        self._meeting.exchange(key, expected, self._seal.close(key, value))

    def read(self, key: str) -> Json | None:
        """What is up under `key`, or None."""
        sealed = self._meeting.read(key)
        return None if sealed is None else self._seal.open(key, sealed)

    def report(self, number: int, place: int, report: Report) -> None:
        """Say how the workers of one host ended in a round."""
        self.post(f"report/{number}/{place}", report.posted(time.time()).to_json())
        if report.failure is not None:
            self.post(f"trouble/{number}", {"place": place})

    def staying(self, number: int, members: Sequence[_NodeDesc]) -> tuple[_NodeDesc, ...]:
        """The hosts of a round but those that were asked to stop, which leave it."""
        pairs = zip(members, self.reports(number, len(members)), strict=True)
        return tuple(node for node, report in pairs if report is None or not report.stopped)

    def reports(self, number: int, num_hosts: int) -> list[Report | None]:
        """What each host has said of its end in a round; None: nothing yet."""
        found = [self.read(f"report/{number}/{place}") for place in range(num_hosts)]
        return [None if one is None else Report.from_json(one) for one in found]

    def has_reported(self, number: int, place: int) -> bool:
        """Whether a host has said how its workers ended."""
        return self.read(f"report/{number}/{place}") is not None

    def in_trouble(self, number: int) -> bool:
        """Whether workers of any host have failed in a round."""
        return self.read(f"trouble/{number}") is not None

    def lost_a_peer(self, number: int, num_hosts: int) -> bool:
        """Whether workers have failed in a round, and all that have said why have lost a peer."""
        if not self.in_trouble(number):
            return False
        failures = [one.failure for one in self.reports(number, num_hosts) if one is not None and one.failure]
        return bool(failures) and all(failure.consequence for failure in failures)

    def start_again(self, number: int) -> None:
        """Let all hosts go on to the round after this one."""
        self.post(f"again/{number}", {})

    def starts_again(self, number: int) -> bool:
        """Whether all hosts go on to the round after this one."""
        return self.read(f"again/{number}") is not None

    def hand_over(self) -> None:
        """Say that this host, which leads, leaves as it was asked to, and is not lost."""
        self.post("left", [socket.gethostname(), os.getpid()])

    def end(self, ending: Ending) -> None:
        """Say how the run ends for all, unless somebody has said so before."""
        self._meeting.exchange("ending", "", self._seal.close("ending", ending.to_json()))

    def ending(self) -> Ending | None:
        """How the run has ended for all, or None."""
        found = self.read("ending")
        return None if found is None else Ending.from_json(found)

    def say_goodbye(self, node: _NodeDesc) -> None:
        """Say that a host leaves, and has read how the run has ended."""
        self.post(f"bye/{key_of(node)}", {})

    def has_left(self, node: _NodeDesc) -> bool:
        """Whether a host has said so."""
        return self.read(f"bye/{key_of(node)}") is not None
