"""Everything that matters, into a checkpoint and back (law 8)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from allranks.checkpointing.checking import check_digests, check_files
from allranks.checkpointing.checkpoint import Checkpoint, Header, check_sizes, prune, verify_files
from allranks.checkpointing.restore import restore
from allranks.checkpointing.save import save
from allranks.config import CheckpointConfig, ScheduleConfig
from allranks.data.stream import DataStream
from allranks.errors import CheckpointError
from allranks.parallel.parallelize import Spread
from allranks.parameter_map import Entry
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.schedule import Schedule
from allranks.stepping.world import Processes
from allranks.training.newest import newest_of_run

Parts = list[tuple[Entry, torch.Tensor]]


class Stateful(Protocol):
    """What a Task offers: JSON values, and taking them back."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values to remember."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, as live values.

    Attributes:
        extra: JSON values beside it, such as the schedule.
        task: whose own state is kept; None for an own loop.
    """

    spread: Spread
    optimizers: Optimizers
    stream: DataStream
    extra: Mapping[str, Any]
    task: Stateful | None = None

    def parts(self) -> Parts:
        """Every tensor under its name in the checkpoint, as this rank holds it."""
        model = [
            (replace(entry, name=f"model.{name}"), self.spread.local(name))
            for name, entry in self.spread.map.stored.items()
        ]
        return model + self.optimizers.parts()

    def aliases(self) -> dict[str, str]:
        """Tied names, by their names in the checkpoint."""
        return {f"model.{alias}": f"model.{name}" for alias, name in self.spread.map.aliases.items()}

    def state(self) -> dict[str, Any]:
        """Everything that is no tensor."""
        return {
            "stream": self.stream.state_dict(),
            "optimizer": self.optimizers.numbers(),
            "task": {} if self.task is None else self.task.state_dict(),
            **self.extra,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Read everything back into place, under any layout; each rank reads its own part; collective.

        Tensors that were cut otherwise before are compared with their digests (law 9).

        Raises:
            CheckpointError: a tensor is missing, extra, reshaped or altered.
        """
        self.optimizers.materialise()
        known = {*checkpoint.manifest.tensors, *checkpoint.manifest.state["optimizer"]}
        self.optimizers.forget_unless(known.__contains__)
        parts = self.parts()
        restore(checkpoint, parts)
        layout = self.spread.mesh.layout
        if checkpoint.manifest.layout != str(layout):
            group = None if layout.world_size == 1 else dist.group.WORLD
            check_digests(checkpoint, parts, group, self.spread.device)
        state = checkpoint.manifest.state
        self.optimizers.load_numbers(state["optimizer"])
        self.stream.load_state_dict(state["stream"])
        self.stream.continue_at(checkpoint.step)
        if self.task is not None:
            self.task.load_state_dict(state["task"])


def schedule_state(schedule: Schedule, config: ScheduleConfig) -> dict[str, Any]:
    """What a checkpoint keeps of a schedule: its samples, and what was asked for."""
    return {"schedule": schedule.state_dict(), "schedule_config": config.model_dump()}


def kept_schedule(checkpoint: Checkpoint | None, config: ScheduleConfig) -> Schedule | None:
    """The schedule of the first start; None where there was none, or where another one is asked for (`--change`)."""
    state = {} if checkpoint is None else checkpoint.manifest.state
    same = state.get("schedule_config") == config.model_dump()
    return Schedule(**state["schedule"]) if same else None


@final
class Saver:
    """Writes the checkpoints of one run.

    Args:
        directory: RUN/checkpoints.
        run: the run's id.
        generation: the attempt, counted over restarts.
    """

    def __init__(
        self,
        contents: Contents,
        processes: Processes,
        config: CheckpointConfig,
        directory: Path,
        run: str,
        generation: int,
    ) -> None:
        self._contents = contents
        self._processes = processes
        self._config = config
        self._directory = directory
        self._run = run
        self._generation = generation
        self._proven = False
        self._good: set[Path] = set()
        self.saved_step = -1

    def due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step` steps."""
        return self._config.every is not None and step % self._config.every == 0

    def save(self, step: int) -> Path:
        """Write a checkpoint after `step` steps, prove the first one, keep the newest few; collective."""
        contents, processes = self._contents, self._processes
        parts = contents.parts()
        header = Header(
            run=self._run,
            generation=self._generation,
            layout=str(processes.mesh.layout),
            step=step,
            samples=contents.stream.position,
        )
        checkpoint = save(
            self._directory,
            header=header,
            parts=parts,
            aliases=contents.aliases(),
            state=contents.state(),
            group=processes.data_group,
            rank=processes.rank,
            world_size=processes.size,
            token=f"{self._run[:8]}_{self._generation}",
            device=processes.device,
        )
        if not self._proven:
            check_files(checkpoint, processes.data_group, processes.device)
            self._proven = True
        if processes.rank == 0:
            self._good.add(checkpoint.path)
            prune(self._directory, self._config.keep, check=self._check)
        self.saved_step = step
        return checkpoint.path

    def _check(self, checkpoint: Checkpoint) -> None:
        """What this run's own processes have written, or read once, is not read again: that would cost every save."""
        if checkpoint.path in self._good:
            check_sizes(checkpoint)
        else:
            verify_files(checkpoint)
            self._good.add(checkpoint.path)


def find_checkpoint(directory: Path, run: str, processes: Processes) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint of a run, the same on every rank, and why newer ones were passed over; collective.

    Raises:
        CheckpointError: on every rank: there are checkpoints, and all of them are damaged.
    """
    found: dict[str, Any] = {}
    if processes.rank == 0:
        try:
            checkpoint, skipped = newest_of_run(directory, run)
            found = {"name": None if checkpoint is None else checkpoint.path.name, "skipped": skipped}
        except CheckpointError as error:
            found = {"error": str(error)}
    found = processes.share(found)
    if "error" in found:
        raise CheckpointError(found["error"])
    if found["name"] is None:
        return None, found["skipped"]
    return Checkpoint.open(directory / found["name"], run_id=run), found["skipped"]
