"""`allranks plan --check`: `allranks dryrun` for the planner, each in a process of its own and within a limit of time.

So the planner needs no torch, and what a rehearsal takes of time and memory ends with its process.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from allranks.cli.planned_model import Subject
from allranks.layout import Layout
from allranks.plan import Choice
from allranks.plan_request import PlanRequest
from allranks.planning.dry_run import DryRun, read_dry_run
from allranks.planning.hardware import find_cluster
from allranks.planning.question import Question, fixed_micro_steps
from allranks.process_environment import COMMAND
from allranks.units import format_seconds

CHECK_SECONDS: Final = 300.0
"""For all dry runs of a command together."""
ANSWERED: Final = (0, 1)
OF_THE_LAYOUT: Final = ("LayoutError", "TaskError")
"""Kinds of errors that training would raise for this layout, too. Their subclasses are those of a rehearsal alone."""


@final
class Rehearser:
    """Makes dry runs of a request's model for as long as there is time.

    Args:
        program: what `dryrun` and its words are given to.
    """

    def __init__(
        self,
        request: PlanRequest,
        subject: Subject,
        limit_seconds: float = CHECK_SECONDS,
        program: Sequence[str] = COMMAND,
    ) -> None:
        self._arguments, self._subject, self._program = request.arguments, subject, program
        self._sizes = [f"--{name.replace('_', '-')}={value}" for name, value in request.sizes.items()]
        self._devices = {text: find_cluster(text).num_devices for text in request.cluster}
        self._first = request.cluster[0]
        self._limit, self._end = limit_seconds, time.monotonic() + limit_seconds
        self._hopeless = False

    def __call__(self, question: Question, choice: Choice, where: str | None = None) -> DryRun | str | None:
        """What a dry run of `choice` counted, or why there is none; None when time is up, or all would be refused.

        Args:
            where: the `--cluster` that the question's cluster was made of; None: the request's first.
        """
        left = self._end - time.monotonic()
        if left <= 0 or self._hopeless:
            return None
        words = self.words(question, choice, where)
        print("checking: allranks dryrun " + " ".join(words), file=sys.stderr, flush=True)
        try:
            ran = subprocess.run(
                [*self._program, "dryrun", *words, "--json"],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not done within {format_seconds(self._limit)}, which is the limit of all dry runs together"
        return self._read(ran, question, choice)

    def words(self, question: Question, choice: Choice, where: str | None = None) -> list[str]:
        """What `allranks dryrun` is told, so that it rehearses just this choice.

        Another number of devices is told beside the cluster's own words: the name that such a cluster has (1x4:h100)
        would be read as the catalog's device, whatever a file says of its own.
        """
        layout, where = choice.layout, where or self._first
        found = [*self._arguments, *self._sizes, "--cluster", where]
        if question.cluster.num_devices != self._devices[where]:
            found += ["--gpus", str(question.cluster.num_devices)]
        found += ["--layout", str(layout)]
        if layout.cp > 1:
            found.append(f"layout.context={layout.context}")
        if layout.gather != Layout().gather:
            found.append(f"layout.gather={layout.gather}")
        found += [f"train.global_batch={choice.global_batch}", f"train.precision={choice.precision}"]
        if question.seq is not None and self._subject.task is None:
            found.append(f"task.seq={question.seq}")
        profile = question.make_profile(question.seq, choice.precision)
        micro_steps = self._subject.micro_steps or fixed_micro_steps(profile)
        cut = f"train.micro_batch={choice.micro_batch}" if micro_steps is None else f"train.micro_steps={micro_steps}"
        return [*found, cut]

    def _read(self, ran: "subprocess.CompletedProcess[str]", question: Question, choice: Choice) -> DryRun | str:
        try:
            document: Mapping[str, Any] = json.loads(ran.stdout)
        except ValueError:
            last = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
            return f"the dry run ended with exit code {ran.returncode}: {last}"
        if ran.returncode in ANSWERED and "ranks" in document:
            return read_dry_run(document, choice.layout, question.cluster.devices_per_node)
        error = str(document.get("error", f"exit code {ran.returncode}"))
        if document.get("kind") in OF_THE_LAYOUT:
            return DryRun(fault=error)
        self._hopeless = document.get("kind") == "ConfigError"  # the model's or the config's, whatever the layout
        return error
