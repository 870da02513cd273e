"""What a worker shows of itself while it works: a few numbers in memory that its agent reads from the other side.

The memory is shared, so that the agent sees it whatever the worker does: hold Python's lock, wait in C++, stand still.
Times are of the monotonic clock, which all processes of a host share. The loop writes where it is (a tenth of a
microsecond or so for each number); a thread writes a pulse twice a second, which stops where nobody gets Python's lock,
and answers when the agent asks for the collectives.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, final, get_args

from allranks.observing.collectives import collectives_file, write_collectives
from allranks.ordinary_file import open_to_append

PULSE_SECONDS = 0.5
NUM_FIELDS = 17
SLOT_BYTES = 8 * NUM_FIELDS
PULSE, MARK, PHASE, STEP, FIRST, LONGEST, ASKED, ANSWERED, TIME_OVER, FINISHED, LOADED, *_HELD = range(NUM_FIELDS)
HELD_STEP, HELD_FROM, HELD_SIZE, DATASET, BAD_LINKS, SAVED = _HELD
"""Fields of a slot, 64-bit whole numbers each; times in nanoseconds.

PULSE: when the thread last ran. MARK: when the loop last came further. PHASE: what it does since, by its place in
PHASES. STEP: optimizer steps done since the first start. FIRST: how long the first step of this attempt took. LONGEST:
how long later ones take without their loading and compilation, as `Longest` has it. ASKED, ANSWERED: how often the
agent has asked for the collectives, and was answered; below zero where it asks for the stacks of all threads, too.
TIME_OVER: when the run's time is over, or was agreed to be; 0: it has no end. FINISHED: 1 + the exit code with which
the worker's work has come to its own end, but for what is on its way to a mirror; 0: it has not. LOADED: how long the
loading in later steps takes, as `Longest` has it. HELD_STEP, HELD_FROM, HELD_SIZE: the step (from 1) whose samples
the loop has in hand, in a step or while it loads them, its first position and its number of samples; HELD_STEP 0:
none. DATASET: samples of the training data, as far as an index names one; 0: it does not. BAD_LINKS: how many findings
of bad ways to other hosts are in this worker's file (bad_links.py). SAVED: how long nothing comes further in a
checkpoint, as `Longest` has it.
"""

FEW, RECENT = 64, 512

STACK_SIGNAL = signal.SIGRTMIN + 10 if sys.platform == "linux" else signal.SIGUSR2
"""Makes a worker write its main thread's stack to its log; in C, so that it needs no lock of Python's.

Not those of other threads: a process whose signal handler walks the frames of threads that run meanwhile soon ends by
SIGSEGV. These are written by a thread that has Python's lock.
"""

Phase = Literal["start", "first step", "step", "input", "compilation", "evaluation", "checkpoint", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@final
class Longest:
    """How long something takes that is done again and again, from how long it has taken so far.

    What took long once may have been a hiccup; what took long twice of late is how it is. So it is the second longest
    of the last RECENT or more, and two fifths of the longest of all at least, whenever that was. Of the first FEW it
    is the longest.
    """

    def __init__(self) -> None:
        self._count = self._ever = 0
        self._recent = self._before = (0, 0)  # the two longest of a block under way, and of the one before

    def add(self, taken: int) -> int:
        """It has taken so long once more: what is learned by now, in the same unit."""
        first, second = self._recent
        if taken > second:
            self._recent = (taken, first) if taken > first else (first, taken)
            self._ever = max(self._ever, taken)
        found = sorted((*self._recent, *self._before))[-2]
        self._count += 1
        if self._count % RECENT == 0:
            self._before, self._recent = self._recent, (0, 0)
        return self._ever if self._count <= FEW else max(found, self._ever * 2 // 5)


@final
class Heartbeat:
    """One worker's numbers. In a process that nobody watches they are written to memory of its own."""

    def __init__(self, fields: memoryview | None = None) -> None:
        """`fields`: NUM_FIELDS 64-bit whole numbers, shared with the agent."""
        self._fields = memoryview(bytearray(SLOT_BYTES)).cast("q") if fields is None else fields
        self._first = True
        self._began, self._loading, self._compiling = time.monotonic_ns(), 0, 0
        self._steps, self._loads, self._saves = Longest(), Longest(), Longest()
        self._silent = 0  # the longest time in the checkpoint under way in which nothing came further

    def enter(self, phase: Phase) -> None:
        """The loop has come so far; from here on it does this."""
        saves = PHASES[self._fields[PHASE]] == "checkpoint"
        self.progress()
        self._fields[PHASE] = PHASES.index(phase)
        if saves and phase != "checkpoint":
            self._fields[SAVED], self._silent = self._saves.add(self._silent), 0

    def progress(self) -> None:
        """The loop has come further in what it does."""
        now = time.monotonic_ns()
        if PHASES[self._fields[PHASE]] == "checkpoint":
            self._silent = max(self._silent, now - self._fields[MARK])
        self._fields[MARK] = now

    def resumed(self, step: int) -> None:
        """So many steps are done, by earlier attempts."""
        self._fields[STEP] = step
        self.progress()

    @property
    def step(self) -> int:
        """The last step that is done; 0 before the first."""
        return self._fields[STEP]

    @property
    def step_seconds(self) -> float:
        """How long steps take, without loading and behind the first; 0.0: there was none yet."""
        return self._fields[LONGEST] / 1e9

    def found_bad_links(self, number: int) -> None:
        """So many findings are in this worker's file by now."""
        self._fields[BAD_LINKS] = number

    def finish(self, code: int) -> None:
        """The work has come to its own end, and this process ends with `code`: what ends so without this has not. What
        is left is to bring copies elsewhere.
        """
        self._fields[FINISHED] = 1 + code

    def begin_step(self, waited: float = 0.0) -> None:
        """An optimizer step begins; `waited`: for so many seconds the host has just waited for the device behind it."""
        self.enter("first step" if self._first else "step")
        self._began, self._loading, self._compiling = time.monotonic_ns() - round(waited * 1e9), 0, 0

    def order(self, num_samples: int | None) -> None:
        """An order over so many samples is fed; None: no index names a sample."""
        self._fields[DATASET] = num_samples or 0

    def hold(self, step: int, first: int, size: int) -> None:
        """From here to its end the loop has the samples of `step` in hand: `size` from position `first` on."""
        self._fields[HELD_FROM], self._fields[HELD_SIZE], self._fields[HELD_STEP] = first, size, step

    @contextmanager
    def holding(self, step: int, first: int, size: int) -> Iterator[None]:
        """As `hold`, inside alone; an error leaves it standing."""
        before = (self._fields[HELD_STEP], self._fields[HELD_FROM], self._fields[HELD_SIZE])
        self.hold(step, first, size)
        yield
        self.hold(*before)

    def time_over(self, moment: float | None) -> None:
        """The run's time ends at `moment` of `time.monotonic`; None: never."""
        self._fields[TIME_OVER] = 0 if moment is None else round(moment * 1e9)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, this rank loads its data, and no other rank is needed for that."""
        before = PHASES[self._fields[PHASE]]
        if before != "step":
            yield
            return
        self.enter("input")
        began = self._fields[MARK]
        yield
        self.enter(before)
        self._loading += self._fields[MARK] - began

    def begin_compiling(self) -> None:
        """torch's compiler begins. It has its time where a step is under way; what else takes long has its own."""
        if PHASES[self._fields[PHASE]] == "step":
            self.enter("compilation")
            self._compiling -= self._fields[MARK]

    def end_compiling(self) -> None:
        """It has ended."""
        if PHASES[self._fields[PHASE]] == "compilation":
            self.enter("step")
            self._compiling += self._fields[MARK]

    def finish_step(self, step: int) -> None:
        """Step `step` is done."""
        now = time.monotonic_ns()
        taken = now - self._began
        if self._first:
            self._fields[FIRST], self._first = taken, False
        else:
            self._fields[LONGEST] = self._steps.add(taken - self._loading - self._compiling)
            self._fields[LOADED] = self._loads.add(self._loading)
        self._fields[STEP] = step
        self._fields[HELD_STEP] = 0
        self.enter("step")

    def pulse(self, answer: Callable[[bool], None]) -> None:
        """What the thread does each time; `answer` is told whether it is asked for stacks, too."""
        self._fields[PULSE] = time.monotonic_ns()
        asked = self._fields[ASKED]
        if asked != self._fields[ANSWERED]:
            with contextlib.suppress(Exception):  # a full disk is no reason to stop beating
                answer(asked < 0)
            self._fields[ANSWERED] = asked


@final
class _Process:
    """The one heart of this process."""

    heartbeat = Heartbeat()


def current() -> Heartbeat:
    """This process's."""
    return _Process.heartbeat


def join(path: str, slot: int, log: Path) -> None:
    """Let the agent see this process from here on, and ask it where it stands.

    Args:
        path: of the memory, as the agent names it.
        slot: which part of it is this worker's.
        log: gets its stacks. Its collectives come to a file beside it, `collectives_file(log)`.
    """
    # Kept open for life: the handler writes to its descriptor.
    stacks = os.fdopen(open_to_append(log), "a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False, chain=False)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        shared = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    fields = memoryview(shared).cast("q")[slot * NUM_FIELDS : (slot + 1) * NUM_FIELDS]
    _Process.heartbeat = heartbeat = Heartbeat(fields)
    heartbeat.enter("start")
    heartbeat.pulse(lambda stacks: None)
    told = (heartbeat, collectives_file(log), stacks)
    threading.Thread(target=_beat, args=told, name="allranks-heartbeat", daemon=True).start()


def show_compilation(heartbeat: Heartbeat) -> None:
    """Have torch's compiler tell when it is at work, unless it does already; where it is not loaded, it is not."""
    told: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    # Asked for again and again: torch._dynamo.reset() forgets.
    if told is not None and not any(isinstance(one, _Compiler) for one in told.start_callbacks):
        told.register_start_callback(_Compiler(heartbeat.begin_compiling))
        told.register_end_callback(_Compiler(heartbeat.end_compiling))


@final
class _Compiler:
    """What torch's compiler calls."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, arguments: object) -> None:
        self._tell()


def _beat(heartbeat: Heartbeat, answer_to: Path, log: TextIO) -> None:
    def answer(stacks: bool) -> None:
        if stacks:
            faulthandler.dump_traceback(log)
        write_collectives(answer_to)

    while True:
        show_compilation(heartbeat)
        heartbeat.pulse(answer)
        time.sleep(PULSE_SECONDS)
