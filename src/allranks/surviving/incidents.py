"""What became of each fault of a trial, read from what the run has written down about itself. Pure functions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

from allranks.fault_points import Fault, Fired
from allranks.surviving.fault_schedule import RESTARTED
from allranks.surviving.trial_commands import Command

Event = Mapping[str, Any]
Recovery = Literal["restarted", "resumed", "went on", "none"]
_FINAL_LINE = re.compile(r"rank \d+ on \S+")


@final
@dataclass(frozen=True, slots=True)
class Incident:
    """One fault that happened.

    Attributes:
        fault: which.
        recovery: workers were started again; the run had ended and was resumed; nothing had to; nothing followed.
        causes: the lines that give its cause: one, where all is well.
        resumed_step: from where it went on; None: nothing was started again.
        redone: steps that had been finished and were done again.
        seconds: from the fault to the next finished step; None: there was none, or another fault came before.
        beside: ranks that were lost at the same time, by other faults: one restart is the recovery from all of them.
    """

    fault: Fault
    recovery: Recovery
    causes: tuple[str, ...]
    resumed_step: int | None
    redone: int
    seconds: float | None
    beside: tuple[int, ...] = ()

    @property
    def recovered(self) -> bool:
        """Whether the run went on as it has to: by itself where a process was lost.

        Who loses its connections behind the last word to others does not miss them.
        """
        wanted = {"restarted"} if self.fault.kind in RESTARTED else {"restarted", "resumed", "went on"}
        return self.recovery in wanted | ({"went on"} if self.fault.kind == "disconnect" else set())

    def names_rank(self) -> bool:
        """Whether there is one cause, and it names the rank of the fault, or one that was lost with it.

        Both ends of a connection that is lost see the same: any of them may be named.
        """
        ranks = r"\d+" if self.fault.kind == "disconnect" else "|".join(map(str, (self.fault.rank, *self.beside)))
        return len(self.causes) == 1 and re.search(rf"\brank ({ranks})\b", self.causes[0]) is not None

    def to_json(self) -> dict[str, object]:
        """One JSON object."""
        fields = asdict(self.fault) | {"recovery": self.recovery, "recovered": self.recovered}
        told = {"causes": list(self.causes), "resumed_step": self.resumed_step}
        return fields | told | {"redone": self.redone, "seconds": self.seconds}


def read_incidents(
    faults: Sequence[Fault], fired: Mapping[int, Fired], events: Sequence[Event], commands: Sequence[Command]
) -> list[Incident]:
    """The Incidents in the order in which they happened.

    Args:
        events: rank 0's journal, in which the supervisor writes, too.
    """
    by_number = {fault.number: fault for fault in faults}
    order = sorted(fired.values(), key=lambda one: one.time)
    found: list[Incident] = []
    for together in _at_the_same_time(order, by_number, events, commands):
        until = next((one.time for one in order if one.time > together[-1].time), float("inf"))
        ranks = [by_number[one.number].rank for one in together]
        for place, one in enumerate(together):
            incident = _read_incident(by_number[one.number], one, until, events, commands)
            found.append(replace(incident, beside=(*ranks[:place], *ranks[place + 1 :])))
    return found


def _at_the_same_time(
    order: Sequence[Fired], faults: Mapping[int, Fault], events: Sequence[Event], commands: Sequence[Command]
) -> list[list[Fired]]:
    """The faults, those together between which nothing was started again: a thread that saves may meet its own while
    another rank meets the next one in a step.
    """
    found: list[list[Fired]] = []
    for one in order:
        before = found[-1][-1] if found else None
        if before is not None and faults[before.number].kind in RESTARTED and faults[one.number].kind in RESTARTED:
            within = [event for event in events if before.time < event["t"] <= one.time]
            ended = any(before.time <= command.ended <= one.time for command in commands)
            if not (ended or restarts_after_faults(within)):
                found[-1].append(one)
                continue
        found.append([one])
    return found


def _read_incident(
    fault: Fault, fired: Fired, until: float, events: Sequence[Event], commands: Sequence[Command]
) -> Incident:
    later = [event for event in events if event["t"] > fired.time]
    within = [event for event in later if event["t"] <= until]
    restarts = restarts_after_faults(within)
    ended = [command for command in commands if fired.time <= command.ended <= until and command.code]
    warned = [event["what"] for event in within if event["event"] == "verdict" and event["kind"] == "checkpoint"]
    again = [event for event in later if event["event"] == "start"]
    recovery: Recovery = "none"
    causes: list[str] = warned
    if ended:
        recovery = "resumed" if again else "none"
        causes = restarts + [line for command in ended for line in final_lines(command.lines())]
    elif restarts:
        recovery, causes = "restarted" if again else "none", restarts
    elif any(event["event"] in ("step", "end") for event in within) or _goes_on(later):
        return Incident(fault, "went on", tuple(warned), None, 0, None)
    if not again:
        return Incident(fault, recovery, tuple(causes), None, 0, None)
    attempt = _attempt(later, again[0])
    step = next((event for event in attempt if event["event"] == "step" and event["t"] <= until), None)
    said = next((int(event["step"]) for event in attempt if event["event"] == "resume"), None)
    if step is None:  # another fault was faster
        return Incident(fault, recovery, tuple(causes), said, 0, None)
    resumed = said or 0
    before = [event["step"] for event in events if event["event"] == "step" and event["t"] <= again[0]["t"]]
    # A line that was on its way to the disk when the process died is missing: the fault knows its step as well.
    furthest = max([*before, fired.step - 1, 0])
    seconds = round(step["t"] - fired.time, 3)
    return Incident(fault, recovery, tuple(causes), resumed, max(0, furthest - resumed), seconds)


def _goes_on(events: Sequence[Event]) -> bool:
    """Whether a step follows before a start, perhaps after the next fault: a thread that saves may meet its own just
    before the step meets that one.
    """
    return next((event["event"] for event in events if event["event"] in ("step", "end", "start")), "start") != "start"


def restarts_after_faults(events: Sequence[Event]) -> list[str]:
    """What the supervisor said of each restart, but for those by which a run goes back behind a spike of its loss."""
    found, goes_back = list[str](), False
    for event in events:
        kind = event["kind"] if event["event"] == "verdict" else ""
        if kind == "restart" and not goes_back:
            found.append(event["what"])
        goes_back = kind == "rollback" or (goes_back and kind != "restart")
    return found


def _attempt(events: Sequence[Event], start: Event) -> list[Event]:
    """The events of the attempt that begins with `start`."""
    found: list[Event] = []
    for event in events[list(events).index(start) + 1 :]:
        if event["event"] == "start":
            break
        found.append(event)
    return found


def final_lines(lines: Sequence[str]) -> list[str]:
    """The lines of a command's output that begin with the rank that failed, each with the error's own last line."""
    found = []
    for index, line in enumerate(lines):
        if not _FINAL_LINE.match(line):
            continue
        ends_below = line.endswith("failed:")
        found.append(f"{line} {lines[-1]}" if ends_below and index + 1 < len(lines) else line)
    return found
