"""A checkpoint that is written beside the training. Its threads touch files and copies only: no collective, no live
tensor.

    loop, every rank       copies its portion, goes on
    thread, every rank     step-N.tmp-<token>/rank-R.safetensors, written, hashed and synced; rank-R.share.json
    loop, a later step     the ranks have agreed that all have written (their per-step agreement says so), or that
                           one has failed
    thread, first rank     the shares are read; manifest.json, COMMITTED, renamed to step-N, as of any other save
    loop, a later step     the ranks have agreed that it is committed

The shares come through the directory, which all hosts share anyway, so that nothing is exchanged beside a step. They
are gone before the manifest is written.
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from allranks import fault_points
from allranks.checkpointing.checking import check_share
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.commit import Share, commit, explain
from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.checkpointing.portion import Place, Portion, failed_share, write_portion
from allranks.checkpointing.save import give_up, refusal, why_refused
from allranks.durable import write_synced
from allranks.errors import CheckpointError

_ABANDON_SECONDS = 5.0  # a thread that hangs in the system's call does not keep a failing process
_SHARES: TypeAdapter[Any] = TypeAdapter(Share)


class _AbandonedError(Exception):
    """The writing is not wanted any more."""


@dataclass(frozen=True, slots=True)
class World:
    """Who saves together: as the arguments of `save`."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank commits."""
        return self.group is None or dist.get_rank(self.group) == 0


@final
class BackgroundSave:
    """One checkpoint on its way, from `start` to `settle`.

    Args:
        place: where it is written.
        portion: this rank's, in memory that nobody changes; or the error that kept it from one.
        world: who saves.
        ready: waits until the copies are there.
        proves: whether the file is read back and compared with the portion's digests before it counts as written.
        before_commit: called on the first rank, in the thread; as of `save`, where what ends this rank is raised by
            `settle`.
        after_commit: likewise, afterwards; it may delete what other saves have left, because none is under way.

    Attributes:
        place: as given.
    """

    def __init__(
        self,
        place: Place,
        portion: Portion | CheckpointError,
        world: World,
        *,
        ready: Callable[[], None] = lambda: None,
        proves: bool = False,
        before_commit: Callable[[], None] = lambda: None,
        after_commit: Callable[[Checkpoint], None] = lambda checkpoint: None,
    ) -> None:
        self.place = place
        self._portion = portion
        self._world = world
        self._ready, self._proves = ready, proves
        self._before_commit, self._after_commit = before_commit, after_commit
        self._error = ""
        self._ends: Exception | None = None
        self._written = self._agreed = self._named = self._committed = False
        self._abandoned = threading.Event()
        self._thread = self._start(self._write)

    @property
    def step(self) -> int:
        """The optimizer step that it is of."""
        return self.place.header.step

    @property
    def failed(self) -> bool:
        """Whether this rank could not do its part."""
        return bool(self._error)

    @property
    def written(self) -> bool:
        """Whether this rank's part is on the disk."""
        return self._written

    @property
    def committed(self) -> bool:
        """On the first rank: whether the checkpoint has its name and what follows a commit is done, so that the next
        one may begin. Nobody else knows before `settle`.
        """
        return self._committed

    def all_have_written(self) -> None:
        """The ranks have agreed that they all have: the first one commits, in its thread. Called twice: as once."""
        if not self._agreed:
            self._agreed = True
            if self._world.first:
                self._thread = self._start(self._commit)

    def abandon(self) -> None:
        """Write no more of this rank's part, where that is not written yet. A commit under way goes on to its end."""
        self._abandoned.set()
        self._thread.join(_ABANDON_SECONDS)

    def give_way(self) -> bool:
        """Write no more of it; collective. Where all have written their parts already, which is rare, it is committed,
        which is short, and stays; else nothing does.

        Returns:
            Whether it is committed: the same on every rank. Raises as `settle`.
        """
        world = self._world
        self.abandon()
        told = gather_bytes(b"written" if self._written else b"", world.group, world.device)
        whole = b"whole" if told and all(told) else b""
        if broadcast_bytes(whole, world.group, world.device):
            self.settle()
            return True
        if world.first:
            shutil.rmtree(self.place.temporary, ignore_errors=True)
        return False

    def settle(self) -> None:
        """Wait until it is committed; collective. Every rank returns, or every rank raises.

        Raises:
            CheckpointError: naming rank, path and reason; what was there before is untouched.
            ProcessError: a peer was lost.
            Exception: on the first rank: what `before_commit` has raised, if that ends this rank.
        """
        world, place = self._world, self.place
        self._thread.join()
        errors = [reason.decode() for reason in gather_bytes(self._error.encode(), world.group, world.device)]
        answer = ""
        if world.first:
            errors = [error for error in errors if error]
            if not errors:
                self.all_have_written()
                self._thread.join()
                errors = [self._error] if self._error else []
            if self._ends is not None:
                raise self._ends
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            if errors:
                answer = errors[0] if self._named else refusal(place, errors[0] + more)
        answer = broadcast_bytes(answer.encode(), world.group, world.device).decode()
        if answer:
            give_up(place, world.group, world.device)
            raise CheckpointError(answer)

    def fail(self) -> None:
        """The ranks have agreed that one has failed: all stop, and raise what that one says; collective."""
        self.abandon()
        self.settle()

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            fault_points.begin_step(self.step)
            work()

        thread = threading.Thread(target=run, name=f"allranks-{self.place.temporary.name}", daemon=True)
        thread.start()
        return thread

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError("it was not wanted any more")

    def _write(self) -> None:
        rank = self._world.rank
        try:
            if isinstance(self._portion, CheckpointError):
                raise self._portion
            self._ready()
            share = write_portion(self.place, self._portion, self._check, looks=self._world.first)
            if not share.error:
                if self._proves:
                    check_share(self.place.temporary, self.place.header, share)
                write_synced(_share_file(self.place.temporary, rank), json.dumps(asdict(share)))
                fault_points.reach("background.written")
        except Exception as error:  # whatever it is, the loop and the other ranks must hear of it
            share = failed_share(self.place, rank, error)
        if share.error and not self._abandoned.is_set():
            self._error = share.error
        self._written = not share.error

    def _commit(self) -> None:
        place = self.place
        assert isinstance(self._portion, Portion)
        try:
            refused = why_refused(self._before_commit)
        except Exception as error:  # raised by `settle`, on the thread whose end it is
            self._ends, self._error = error, failed_share(place, self._world.rank, error).error
            return
        try:
            if refused is not None:
                raise refused
            fault_points.reach("background.commit")
            shares = _take_shares(place.temporary, self._world.size)
            state: Mapping[str, Any] = self._portion.state
            manifest = commit(place.temporary, place.target, place.header, shares, state, torch.__version__)
            self._named = True
            self._after_commit(Checkpoint(place.target, manifest))
            self._committed = True
        except Exception as error:
            self._error = failed_share(place, self._world.rank, error).error


def _share_file(temporary: Path, rank: int) -> Path:
    return temporary / f"rank-{rank:05d}.share.json"


def _take_shares(temporary: Path, world_size: int) -> Sequence[Share]:
    """What the ranks have told, by rank; the files that they have told it in are gone afterwards.

    Raises:
        CheckpointError: one is missing, or says something else.
    """
    shares = []
    for rank in range(world_size):
        path = _share_file(temporary, rank)
        try:
            shares.append(_SHARES.validate_json(path.read_bytes()))
            path.unlink()
        except OSError as error:
            raise CheckpointError(
                f"{path}: {error.strerror}: written by its rank, not to be seen here; checkpoints need a directory "
                "that all hosts share"
            ) from error
        except ValidationError as error:
            raise CheckpointError(f"{path}: {explain(error, path).splitlines()[0]}; the share is damaged") from error
    return shares
