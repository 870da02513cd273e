"""The sentinels of a loop of one's own: ranks are compared after its first step, every so many, and at its end; what
they must have alike before each save, too.

The first checkpoint is held against the run, as that of a Task is. What `allranks train` hears in the agreement of
every step is told in these rounds. The learning rate and the steps are the user's: nobody watches them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.config import GuardConfig
from allranks.data.micro_step import StepBatch
from allranks.data.stream import DataStream
from allranks.errors import GuardError
from allranks.parallel.spread import Spread
from allranks.stepping.agreement import Agreed
from allranks.stepping.ema import Ema
from allranks.stepping.linkage import Linkage
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.posting import Posted, post_sentinels
from allranks.stepping.replicas import Replicas
from allranks.stepping.scaler import Scaler
from allranks.stepping.world import Processes
from allranks.training.comparing import CHECKPOINT, Comparing, Findings
from allranks.training.own.links import Links
from allranks.training.own.run import Logbook
from allranks.training.proof import prove
from allranks.training.snapshot import Contents
from allranks.verdict import Verdict


class Step(Protocol):
    """What the watch asks of the step."""

    beside: list[Ema | Scaler]
    links: Links

    def agreed(self, lag: int) -> Agreed | None:
        """What the ranks agreed on `lag` steps before the last one. Raises TaskError where they have parted."""


class Loop(Protocol):
    """What the watch asks of the loop."""

    order: DataStream

    def open(self) -> Logbook:
        """Where it is written."""

    def say(self, line: str) -> None:
        """Rank 0: one line on standard error."""


@dataclass(frozen=True, slots=True)
class Link:
    """An optimizer, and what it held of the model when it was made."""

    spread: Spread
    optimizers: Optimizers
    linkage: Linkage


@dataclass(frozen=True, slots=True)
class Guards:
    """The sentinels of one optimizer and of what follows its parameters by now."""

    link: Link
    num_beside: int
    posted: Posted
    comparing: Comparing


@final
@dataclass(frozen=True, slots=True)
class Stepped:
    """What a loop trains, as `prove` asks for it; the learning rate is the user's."""

    processes: Processes
    spread: Spread
    optimizers: Optimizers
    stream: DataStream
    beside: Sequence[Ema | Scaler]
    schedule: None = None


@final
class OwnWatch:
    """Watches over a model and the optimizer that steps it.

    Attributes:
        stopped: the finding that has ended the run, whatever the loop makes of it.
    """

    def __init__(self, guard: GuardConfig, processes: Processes) -> None:
        self.stopped: GuardError | None = None
        self._guard, self._processes = guard, processes
        self._findings = Findings(guard, self._tell, 'mute="{name}"')
        self._link: Link | None = None
        self._guards: Guards | None = None
        self._stepping: Optimizers | None = None
        self._step: Step | None = None
        self._loop: Loop | None = None
        self._fed_nothing = self._owed = False
        self._last = self._compared = 0

    def link(self, spread: Spread, optimizers: Optimizers) -> None:
        """`optimizers` hold the parameters of `spread`: what parts from here on is found."""
        self._link = Link(spread, optimizers, Linkage(spread, optimizers))

    def begin(self, step: Step, loop: Loop) -> None:
        """There is a loop, and what it steps with."""
        self._step, self._loop = step, loop

    def look(self, batch: StepBatch) -> None:
        """Right after the last backward in the step of `batch`, before the user's next line."""
        self._fed_nothing = self._fed_nothing or any(not micro_step.weight for micro_step in batch.micro_steps)
        if self._link is not None and self._step is not None and self._loop is not None:
            beside, order = self._step.beside, self._loop.order
            now = self._guards
            if now is None or now.link is not self._link or now.num_beside != len(beside):
                link, processes = self._link, self._processes
                given = self._guard, processes, link.spread, link.optimizers, None, order, beside
                posted = post_sentinels(*given, linkage=link.linkage)
                comparing = Comparing(posted, self._findings, processes.world_group, processes.device)
                now = self._guards = Guards(link, len(beside), posted, comparing)
            for replicas in (one for one in now.posted.comparing if isinstance(one, Replicas)):
                replicas.fed_nothing = self._fed_nothing
            now.posted.watch.look("", batch)

    def finish_step(self, optimizers: Optimizers, step: int) -> None:
        """Hear and compare, where that is due after step `step` (from 1); collective then.

        Raises:
            GuardError: on every rank: a finding ends the run.
        """
        self._last, self._stepping = step, optimizers
        if self._guards is None:
            return
        if self._guards.link.optimizers is not optimizers:  # another one was made in between, which does not step yet
            self.link(self._guards.link.spread, optimizers)
            return
        due = self._guards.posted.rounds.due(step)
        self._owed = self._owed or due
        if due or (self._owed and not self._apart):
            self._hold_round(step)

    def finish_loop(self) -> None:
        """The stream is at its end: a last round, where steps came after the one before; collective then."""
        if self._guards is not None and self._guard.digest_every and self._last > self._compared:
            self._owed = True
            self._hold_round(self._last)

    def prove(self, checkpoint: Checkpoint, contents: Contents) -> None:
        """Hold a checkpoint of `contents`, saved just now, against the optimizer that steps and its model; collective.

        Raises:
            GuardError: on every rank: a finding ends the run.
        """
        if CHECKPOINT in self._findings.told or self._guards is None or self._stepping is None:
            return
        assert self._step is not None and self._loop is not None
        spread, stream = self._guards.link.spread, self._loop.order
        live = Stepped(self._processes, spread, self._stepping, stream, self._step.beside)
        with self._stopping():
            self._findings.conclude(CHECKPOINT, prove(checkpoint, live, contents), checkpoint.step)

    def check(self) -> None:
        """Raise again what has ended the run: nothing more is saved of it."""
        if self.stopped is not None:
            raise self.stopped

    def check_copies(self, step: int) -> None:
        """See that what is live after step `step` may be saved: copies are alike, unless they train apart; collective.

        Raises:
            GuardError: on every rank: they are not, or another finding has ended the run before.
        """
        self.check()
        if self._guards is not None and not self._apart:
            with self._stopping():
                self._guards.comparing.compare_copies(step)

    @property
    def _apart(self) -> bool:
        outer = None if self._step is None else self._step.links.outer
        return outer is not None and outer.apart

    def _hold_round(self, step: int) -> None:
        assert self._guards is not None and self._step is not None
        self._step.agreed(0)  # ranks that ran different modules are told so first
        with self._stopping():
            # Before the comparison: what a rank has noticed by itself says more.
            self._guards.comparing.hear(step)
            if not self._apart:
                self._owed, self._compared = False, step
                self._guards.comparing.compare(step)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Keep the finding that ends the run."""
        try:
            yield
        except GuardError as error:
            self.stopped = error
            raise

    def _tell(self, verdict: Verdict, step: int) -> None:
        if self._loop is not None:
            self._loop.open().write("verdict", step=step, **verdict.to_json())
            self._loop.say(f"warning: {verdict}")
