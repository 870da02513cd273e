"""Where every worker of this host stands: its stack and its collectives, asked of it from outside."""

import contextlib
import json
import os
import re
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from allranks.failure import log_file
from allranks.observing.collectives import collectives_file
from allranks.observing.heartbeat import STACK_SIGNAL
from allranks.surviving.beats import SharedBeats
from allranks.surviving.kernel import STOPPED
from allranks.surviving.monitor import Row

ANSWER_SECONDS = 2.0
POLL_SECONDS = 0.05
MAIN_SECONDS = 0.5  # for the stacks of main threads, before those of the others are asked for
SHOWN_FRAMES = 12

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
# What faulthandler writes before a stack: of several threads, or of one.
_THREAD = re.compile(r"((Current thread|Thread) 0x[0-9a-f]+|Stack \(most recent call first\)).*:$")
# Whose code a frame is not: the user's is what lies elsewhere.
_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<frozen",
)
_PACKAGES = tuple(f"{folder}/" for folder in (sysconfig.get_path("purelib"), Path(__file__).parents[2]))


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file
        for folder in _PACKAGES:  # torch/nn/modules/linear.py says enough
            file = file.removeprefix(folder)
        return f"{file}:{self.line} in {self.function}"

    @property
    def of_the_user(self) -> bool:
        """Whether it is in a file of the user's, rather than of Python, torch or allranks."""
        return not self.file.startswith(_NOT_THE_USERS)

    @property
    def of_python(self) -> bool:
        """Whether it is in Python's own library: who waits there waits for whoever called it."""
        return self.file.startswith((sysconfig.get_path("stdlib"), "<frozen")) and not self.file.startswith(_PACKAGES)


@final
@dataclass(frozen=True, slots=True)
class Collective:
    """The place of a rank in the collectives of one group; fields as `collectives.last_collectives` gives them."""

    group: str
    axis: str
    ranks: tuple[int, ...]
    name: str
    seq: int
    p2p: bool
    sizes: tuple[tuple[int, ...], ...]
    waits: bool

    def __str__(self) -> str:
        shape = ", ".join(str(list(size)) for size in self.sizes[:2])
        return f"{self.name} number {self.seq} over {self.axis}" + (f", of {shape}" if shape else "")

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Collective":
        """What a worker wrote of itself. Raises KeyError, ValueError, TypeError."""
        return cls(
            group=str(entry["group"]),
            axis=str(entry["axis"]),
            ranks=tuple(entry["ranks"]),
            name=str(entry["name"]),
            seq=int(entry["seq"]),
            p2p=bool(entry["p2p"]),
            sizes=tuple(tuple(size) for size in entry["sizes"]),
            waits=bool(entry["waits"]),
        )


@final
@dataclass(frozen=True, slots=True)
class Testimony:
    """What is known of one rank.

    Attributes:
        stack: of its main thread, innermost first; empty where it could not answer.
        collectives: one for each group it has used, as far as it could answer.
        host: the name of its host, where the run has several; else "".
    """

    row: Row
    stack: tuple[Frame, ...] = ()
    collectives: tuple[Collective, ...] = ()
    host: str = ""

    @property
    def waits_in(self) -> Collective | None:
        """The collective that it has begun and that has not ended, or None."""
        return next((one for one in self.collectives if one.waits), None)

    @property
    def place(self) -> Frame | None:
        """The innermost line of the user's; where there is none, of a package's; else the innermost of all."""
        own = (frame for frame in self.stack if frame.of_the_user)
        package = (frame for frame in self.stack if not frame.of_python)
        return next(own, next(package, self.stack[0] if self.stack else None))

    def to_json(self) -> dict[str, Any]:
        """What another host needs of it to judge, as one JSON object: the stack as far as a verdict shows it."""
        shown, place = self.stack[:SHOWN_FRAMES], self.place
        stack = shown if place is None or place in shown else (*shown, place)
        return {
            "row": asdict(self.row),
            "stack": [asdict(frame) for frame in stack],
            "collectives": [asdict(one) for one in self.collectives],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], host: str) -> "Testimony":
        """What `to_json` gave on `host`."""
        stack = tuple(Frame(**frame) for frame in value["stack"])
        return cls(Row(**value["row"]), stack, tuple(map(Collective.from_json, value["collectives"])), host)


def question(rows: Sequence[Row], places: Mapping[int, int], beats: SharedBeats, logs: Path) -> list[Testimony]:
    """Ask every worker of this host where it stands, and wait for up to two seconds.

    Args:
        places: global rank -> local rank.
        logs: the folder with the ranks' logs.
    """
    paths = {row.rank: log_file(logs, row.rank) for row in rows}
    before = {rank: size_of(path) for rank, path in paths.items()}
    asked = [row for row in rows if row.pulse_seconds is not None and row.state not in STOPPED]
    for row in asked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(row.pid, STACK_SIGNAL)
    deadline, last = time.monotonic() + ANSWER_SECONDS, before
    threads_at, asks = time.monotonic() + MAIN_SECONDS, True
    while asked and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        sizes = {rank: size_of(path) for rank, path in paths.items()}
        # A stack is written in many small pieces: it is whole when nothing more comes.
        whole = all(before[row.rank] < last[row.rank] == sizes[row.rank] for row in asked)
        if asks and (whole or time.monotonic() > threads_at):
            beats.ask(stacks=True)  # not before: two that write at once mix their lines
            asks = False
        elif whole and not asks and all(beats.answered(places[row.rank]) for row in asked):
            break
        last = sizes
    found = []
    for row in rows:
        stack = main_stack(tail(paths[row.rank], before[row.rank])) if row in asked else ()
        told = read_collectives(collectives_file(paths[row.rank])) if beats.answered(places[row.rank]) else ()
        found.append(Testimony(row, stack, told if row in asked else ()))
    return found


def main_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's stack in what faulthandler wrote, innermost first: it is the last one, whoever wrote it."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (match := _FRAME.fullmatch(line)):
            stacks[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(stacks[-1]) if stacks else ()


def read_collectives(path: Path) -> tuple[Collective, ...]:
    """What a worker wrote of itself; nothing where it cannot be read. The file goes."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        path.unlink(missing_ok=True)
        return tuple(map(Collective.from_json, told["groups"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, offset: int) -> str:
    """What a file holds from `offset` on; nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
