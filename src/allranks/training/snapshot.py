"""Everything that matters, into a checkpoint and back (law 8)."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.checkpointing.checking import check_digests
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.divided import read_index_divided, verify_files_divided
from allranks.checkpointing.each import adapt
from allranks.checkpointing.looking_again import await_name
from allranks.checkpointing.manifest import check_readable, encode_state
from allranks.checkpointing.parts import stored_parts
from allranks.checkpointing.peers import first_word
from allranks.checkpointing.reading import held
from allranks.checkpointing.restore import is_of_one_rank, name_of_rank, restore
from allranks.config import ScheduleConfig
from allranks.data.resuming import circumstances, compare_circumstances
from allranks.data.stream import DataStream
from allranks.errors import CheckpointError, TaskError
from allranks.observing import heartbeat
from allranks.parallel.running_statistics import mean_of_ranks
from allranks.parallel.spread import Spread
from allranks.parameter_map import EACH, Entry
from allranks.stepping.alike import everyones
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.outer import OuterOptimizer
from allranks.stepping.schedule import Schedule
from allranks.stepping.session import Session
from allranks.stepping.world import Processes
from allranks.training.beside import PREFIXES, Beside, Stateful, compare_beside
from allranks.training.kept_state import check_kept, read_schedule
from allranks.training.newest import newest_of_run
from allranks.training.same_data import keep
from allranks.verdict import Decision

Parts = list[tuple[Entry, torch.Tensor]]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, as live values.

    Attributes:
        extra: JSON values beside it, such as the schedule.
        task: whose own state is kept; None for an own loop.
        outer: of local_sgd; None without.
        beside: what has tensors besides model and optimizer.
        fingerprint: of the data (data/fingerprint.py); {} of none.
    """

    spread: Spread
    optimizers: Optimizers
    stream: DataStream
    extra: Mapping[str, Any]
    task: Stateful | None = None
    outer: OuterOptimizer | None = None
    beside: Sequence[Beside] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_session(cls, session: Session, config: ScheduleConfig, fingerprint: Mapping[str, str]) -> "Contents":
        """Those of a training."""
        return cls(
            session.spread,
            session.optimizers,
            session.stream,
            extra=schedule_state(session.schedule, config),
            task=session.task,
            outer=session.outer,
            beside=session.beside,
            fingerprint=fingerprint,
        )

    def parts(self, stored: Collection[str] | None = None) -> Parts:
        """Every tensor under its name in the checkpoint, as this rank holds it; collective where ranks learn their own.

        Of running statistics that each data-parallel rank has learnt by itself there is the mean, under the plain name,
        and every rank's under a name of its own; every rank holds copies of all of them.
        """
        model, by_rank = list[tuple[Entry, torch.Tensor]](), self.spread.batch_norms.by_rank()
        for name, entry in self.spread.map.stored.items():
            ranks = by_rank.get(name)
            tensor = self.spread.local(name) if ranks is None else mean_of_ranks(ranks)
            model.append((replace(entry, name=f"model.{name}"), tensor))
            for rank, own in enumerate(ranks or ()):
                model.append((replace(entry, name=name_of_rank(f"model.{name}", rank)), own))
        inner = self.optimizers.parts() + (self.spread.hook.parts(self.spread.map) if self.spread.hook else [])
        found = model + inner if self.outer is None else self.outer.parts(model, inner, stored)
        return found + [part for other in self.beside for part in other.parts()]

    def aliases(self) -> dict[str, str]:
        """Tied names, by their names in the checkpoint."""
        tied = {f"model.{alias}": f"model.{name}" for alias, name in self.spread.map.aliases.items()}
        return tied | {alias: name for other in self.beside for alias, name in other.aliases().items()}

    def state(self) -> dict[str, Any]:
        """Everything that is no tensor."""
        return {
            "stream": self.stream.state_dict(),
            "dataset": circumstances(self.stream) | keep(self.fingerprint, self.stream),
            "optimizer": self._numbers(),
            "task": {} if self.task is None else self.task.state_dict(),
            **self.extra,
        }

    def load(self, checkpoint: Checkpoint) -> tuple[Decision, ...]:
        """Read everything back into place, under any layout; each rank reads its own part; collective.

        Tensors that were cut otherwise before are compared with their digests (law 9).

        Returns:
            What goes on otherwise than it was, for whoever announces the resume.

        Raises:
            CheckpointError: a tensor is missing, extra, reshaped or altered; the dataset has another length; what is
                no tensor is missing or of another type.
        """
        state = check_kept(checkpoint, self.optimizers)
        decisions = compare_circumstances(state.get("dataset", {}), checkpoint.manifest.samples, self.stream)
        self.optimizers.materialise()
        known = {*(name.removesuffix(EACH) for name in checkpoint.manifest.tensors), *state["optimizer"]}
        self.optimizers.forget_unless(known.__contains__)
        with held(checkpoint.path):
            decisions += self._restore(checkpoint)
        self.optimizers.load_numbers(state["optimizer"])
        self.stream.load_state_dict(state["stream"])
        self.stream.continue_at(checkpoint.step)
        if self.task is not None:
            self.task.load_state_dict(state["task"])
        return decisions

    def _restore(self, checkpoint: Checkpoint) -> tuple[Decision, ...]:
        """Fill every tensor, and compare digests where it was cut otherwise."""
        spread, stored = self.spread, checkpoint.manifest.tensors
        change = compare_beside(self.beside, stored)
        parts = [(entry, own) for entry, own in self.parts(stored) if not entry.name.startswith(change.begins)]
        theirs = {name for name in checkpoint.manifest.tensors if is_of_one_rank(name)}
        ours = {entry.name for entry, _ in parts if is_of_one_rank(entry.name)}
        same = theirs == ours
        if not same:
            # What each of another number of ranks has learnt is for none of these: all begin with the mean.
            live = ((entry, entry.name.removeprefix("model.")) for entry, _ in parts)
            kept = {entry.name: spread.local(name) for entry, name in live if name in spread.batch_norms.own_names}
            parts = [(entry, kept.get(entry.name, own)) for entry, own in parts if entry.name not in ours]
        world = None if spread.mesh.layout.world_size == 1 else dist.group.WORLD
        index = read_index_divided(checkpoint, world, spread.device)
        adapted = adapt(checkpoint, stored_parts(parts), self._all_names, index)
        parts, theirs = adapted.fitting, theirs | adapted.leftover
        names = self._all_names(entry.name for entry, _ in parts) | theirs | change.left
        restore(checkpoint, parts, names, index=index, progress=heartbeat.current().progress)
        if self.outer is not None:
            self.outer.restored(stored)
        if checkpoint.manifest.layout != str(spread.mesh.layout):
            unread = change.left | (theirs - set(ours if same else ()))
            check_digests(checkpoint, parts, world, spread.device, without=unread)
        for other in self.beside:
            if other.prefix in change.begins:
                if self.outer is not None and self.outer.apart:
                    raise CheckpointError(
                        f"{checkpoint.path.name}: {PREFIXES[other.prefix]} would begin here, where the copies of "
                        f"layout.local_sgd are apart: begin from a step that {self.outer.every} divides"
                    )
                other.begin()
        if same:
            values = {entry.name: own for entry, own in parts}
            for name in spread.batch_norms.own_names:
                spread.local(name).copy_(values[name_of_rank(f"model.{name}", spread.mesh.dp_rank)])
            return change.decisions + adapted.decisions
        number = len({name.rpartition("@")[2] for name in theirs if is_of_one_rank(name)})
        what = "running batch statistics go on from the mean over the ranks"
        said = (Decision(what, f"{number} data-parallel ranks have saved their own"),) if number else ()
        return change.decisions + adapted.decisions + said

    def _all_names(self, names: Iterable[str]) -> set[str]:
        return {name for some in self._of_all_stages(list(names)) for name in some}

    def _numbers(self) -> dict[str, object]:
        return {name: value for some in self._of_all_stages(self.optimizers.numbers()) for name, value in some.items()}

    def _of_all_stages(self, value: Any) -> list[Any]:
        """What each stage of a pipeline has of it, as JSON; collective then."""
        stages = self.spread.stages
        return [value] if stages is None else everyones(value, stages.group, self.spread.device)


def schedule_state(schedule: Schedule, config: ScheduleConfig) -> dict[str, Any]:
    """What a checkpoint keeps of a schedule: its samples, and what was asked for."""
    return {"schedule": schedule.state_dict(), "schedule_config": config.model_dump()}


def kept_schedule(checkpoint: Checkpoint | None, config: ScheduleConfig) -> Schedule | None:
    """The schedule of the first start; None where there was none, or where another one is asked for (`--change`).

    Raises:
        CheckpointError: the checkpoint names what was asked for, and has no schedule.
    """
    state = {} if checkpoint is None else checkpoint.manifest.state
    same = state.get("schedule_config") == config.model_dump()
    return read_schedule(checkpoint) if same and checkpoint is not None else None


def check_state(contents: Contents) -> None:
    """See that what is no tensor can be kept. Raises TaskError: something cannot, names its key and type; too long."""
    encoded = {}
    try:
        for key, value in contents.state().items():
            encoded[key] = encode_state(value, "state_dict()" if key == "task" else key)
    except CheckpointError as error:
        raise TaskError(
            f"no checkpoint could be written: {error}; for a tensor return tensor.tolist(), or make it a buffer of the "
            "model"
        ) from error
    try:
        check_readable(json.dumps(encoded))
    except CheckpointError as error:
        raise TaskError(f"no checkpoint could be written: {error}") from error


def find_checkpoint(
    directory: Path, run: str, processes: Processes, memory: Path | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint of a run, the same on every rank, and why newer ones were passed over; collective.

    Rank 0 chooses by names and manifests; the files of what it has chosen are read by all ranks, each its part. Where
    one of them finds damage, the choice is made again without that checkpoint.

    Args:
        memory: where copies lie in the memory of the one host that all ranks are on; None: nowhere.

    Raises:
        CheckpointError: on every rank: there are checkpoints, and all of them are damaged.
    """
    damaged: dict[Path, str] = {}
    while True:
        found = processes.share(_choose(directory, run, memory, damaged) if processes.rank == 0 else {})
        if "error" in found:
            raise CheckpointError(found["error"])
        if found["name"] is None:
            return None, found["skipped"]
        place = memory if memory is not None and found["copy"] else directory
        try:
            return _open_verified(place / found["name"], run, processes), found["skipped"]
        except CheckpointError as error:
            damaged[place / found["name"]] = str(error)


def _choose(directory: Path, run: str, memory: Path | None, damaged: Mapping[Path, str]) -> dict[str, Any]:
    """For rank 0: the newest that is not known to be damaged (path -> how), for all ranks to hear."""

    def check(checkpoint: Checkpoint) -> None:
        if checkpoint.path in damaged:
            raise CheckpointError(damaged[checkpoint.path])

    try:
        checkpoint, skipped = newest_of_run(directory, run, memory, check)
    except CheckpointError as error:
        return {"error": str(error)}
    copy = checkpoint is not None and checkpoint.path.parent == memory
    return {"name": None if checkpoint is None else checkpoint.path.name, "skipped": skipped, "copy": copy}


def _open_verified(path: Path, run: str, processes: Processes) -> Checkpoint:
    """The checkpoint there, of which all ranks have read every byte. Raises CheckpointError, on every rank."""
    checkpoint, wrong = None, ""
    if processes.rank:
        await_name(path)  # rank 0 has seen it
    try:
        checkpoint = Checkpoint.read(path, run)
    except CheckpointError as error:
        wrong = str(error)
    wrong = first_word(wrong, processes.world_group, processes.device)
    if checkpoint is None or wrong:
        raise CheckpointError(wrong)
    # Nothing beats in a start but what comes further; of a large checkpoint this takes longer than any limit.
    progress = heartbeat.current().progress
    verify_files_divided(checkpoint, processes.world_group, processes.device, progress)
    return checkpoint
