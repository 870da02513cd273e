"""A Run: one training, in progress or over, as a directory that a crash leaves readable.

    RUN/run.json              who it is: id, task, name, created, versions, argv, attempts, config_digest
    RUN/config.toml           the resolved config; plan.json: the plan it was started from, where there is one
    RUN/lease                 locked while a process trains here
    RUN/journal/rank-00000.jsonl ...    what happened, one JSON object a line (observing/journal.py says which)
    RUN/logs/ RUN/checkpoints/ RUN/tensorboard/ RUN/traces/

Run is the only noun with state: it holds the lease and counts the attempts. All else is read from the disk when asked.
"""

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, final

from allranks.config import Config, is_as_written, read_config, write_config
from allranks.durable import make_folders, preflight_writable, refusing, replacing, sync, write_json
from allranks.errors import AllranksError, RunError
from allranks.failure import log_file
from allranks.journal_events import last_step, latest_steps, read_events
from allranks.lease import Holder, Lease
from allranks.ordinary_file import read_small

__all__ = ["Holder", "Run", "preflight_writable", "safe_name"]

ROOMS = ("journal", "logs", "checkpoints", "tensorboard", "traces")
IDENTITY_KEYS = {"id": str, "task": str, "name": str, "created": str, "attempts": int}


@final
class Run:
    """One training: a directory, an append-only journal for each rank, and a lease that keeps a second writer out.

    Made by `Run.create` or `Run.open`, never directly.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._identity = dict(identity)
        self._lease = Lease(path / "lease")

    def __repr__(self) -> str:
        total = None
        with contextlib.suppress(AllranksError):
            total = self.config().train.steps
        return f"<Run {self.id[:4]} step {self.last_step}/{total or '?'}>"

    @classmethod
    def create(
        cls, root: Path, task_name: str, config: Config, run_json: Mapping[str, Any], *, directory: Path | None = None
    ) -> "Run":
        """Write a new Run below `root`, whole or not at all, and return it.

        Args:
            root: the directory of runs; made if absent.
            task_name: what to call it; only letters, digits, `_` and `-` of it reach the directory's name.
            config: the resolved config, written as config.toml.
            run_json: what else run.json records: task (the spec, absolute), allranks, torch, argv, config_digest.
            directory: exactly this path instead of a new name below `root`; it must be absent or empty.

        Raises:
            RunError: the directory cannot be written, or `directory` is not empty.
        """
        identity = _new_identity(task_name, run_json)
        now = datetime.fromisoformat(identity["created"])
        path = directory or root / f"{now:%Y%m%d-%H%M%S}-{safe_name(task_name)}-{identity['id'][:4]}"
        preflight_writable(path.parent)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path} is not empty, so no new run can start there; name another directory with --run DIR")
        _create_directory(path, identity, config)
        return cls(path, identity)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """The Run that stands at `path`.

        Raises:
            RunError: nothing is there, it is no Run, or its run.json cannot be read; one line each.
        """
        if not path.exists():
            raise RunError(f"{path}: no such directory; start a run with `allranks train`, or look in {path.parent}")
        record = path / "run.json"
        if not record.is_file():
            raise RunError(f"{path} is not a run: it has no run.json; a run is a directory that `allranks train` made")
        return cls(path, _read_identity(record))

    @property
    def identity(self) -> dict[str, Any]:
        """All of run.json, as it was when this Run was opened or last counted an attempt."""
        return dict(self._identity)

    @property
    def id(self) -> str:
        """16 hex digits; the directory's name carries the first four."""
        return str(self._identity["id"])

    @property
    def name(self) -> str:
        """The task's name, as the user wrote it."""
        return str(self._identity["name"])

    @property
    def task(self) -> str:
        """The task's spec, with an absolute path where it is a file."""
        return str(self._identity["task"])

    @property
    def attempts(self) -> int:
        """How many times training has started here."""
        return int(self._identity["attempts"])

    @property
    def config_path(self) -> Path:
        """RUN/config.toml."""
        return self.path / "config.toml"

    @property
    def plan_path(self) -> Path:
        """RUN/plan.json: what was decided and predicted before the start; absent where nothing was."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """RUN/checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """RUN/tensorboard: what `tensorboard --logdir` takes."""
        return self.path / "tensorboard"

    @property
    def traces(self) -> Path:
        """RUN/traces."""
        return self.path / "traces"

    @property
    def attempt(self) -> str:
        """The newest start's name, which no other has, not even one of a copy of this directory; "" before it."""
        return str(self._identity.get("attempt", ""))

    def journal(self, rank: int = 0) -> Path:
        """The journal of one rank."""
        return self.path / "journal" / f"rank-{rank:05d}.jsonl"

    def log(self, rank: int = 0) -> Path:
        """What one rank printed."""
        return log_file(self.path / "logs", rank)

    def config(self) -> Config:
        """The config that stands in the directory.

        Raises:
            ConfigError: config.toml is missing or altered.
        """
        return read_config(self.config_path)

    def check_config(self) -> None:
        """See that config.toml is as allranks wrote it. Raises RunError: else a resume would compute something else."""
        with contextlib.suppress(OSError):  # whoever reads it next says why it cannot
            if not is_as_written(self.config_path):
                raise RunError(
                    f"{self.config_path} is not as allranks wrote it, but edited, damaged or cut off: restore it and "
                    f"put a change on the command line (`allranks train --resume {self.path} key=value`, with "
                    "`--change key` where it changes what the run means), or, to take the file as it stands, delete "
                    "its line '# SHA-256 of what follows'"
                )

    def write_config(self, config: Config) -> None:
        """Replace config.toml, whole or not at all: a resume may change what does not change meaning.

        Raises RunError: a later attempt has begun than this Run knows of, and its config is not this process's to
        change; or the directory refuses.
        """
        with refusing(self.config_path), replacing(self.config_path) as temporary:
            write_config(config, temporary)
            self._check_newest()  # right before the rename: this process may have been frozen

    def _check_newest(self) -> None:
        self._lease.check()
        told = _read_identity(self.path / "run.json")
        if told["id"] == self.id and int(told["attempts"]) > self.attempts:
            raise RunError(
                f"attempt {told['attempts']} of {self.path} has begun, this is attempt {self.attempts}: a later one "
                "has taken over, and this one stops"
            )

    def begin_attempt(self, attempt: str | None = None) -> int:
        """Count one more start of training, on disk, by this name or a new one; its number. For the lease's holder."""
        identity = _read_identity(self.path / "run.json")
        name = attempt or secrets.token_hex(8)
        self._write_identity(identity | {"attempts": int(identity["attempts"]) + 1, "attempt": name})
        return self.attempts

    def replace_identity(self, task_name: str, run_json: Mapping[str, Any]) -> None:
        """Make it another Run at the same path, without attempts; arguments as for `create`. For the lease's holder."""
        self._write_identity(_new_identity(task_name, run_json))

    def _write_identity(self, identity: dict[str, Any]) -> None:
        with refusing(self.path), replacing(self.path / "run.json") as temporary:
            write_json(temporary, identity)
            self._lease.check()  # right before the rename: this process may have been frozen
        self._identity = identity

    def acquire(self, deposed: Collection[tuple[str, int]] = ()) -> None:
        """Take the lease, so that nobody else trains here; it ends with this process, however that dies.

        Raises RunError: another process holds it (said within 2 s, with host, pid and since when) and is none of
        `deposed` (hosts and pids), the directory is read-only, or something else stands where a room of it should.
        """
        with refusing(self.path):
            self._lease.acquire(deposed)
            # Another process may have counted attempts since this one looked.
            self._identity = _read_identity(self.path / "run.json")
            make_folders(self.path, ROOMS)  # somebody may have tidied up: `rm -r RUN/logs`

    def release(self) -> None:
        """Give the lease back; nothing happens where it is not held."""
        self._lease.release()

    def holder(self) -> Holder | None:
        """Who trains here now, or None."""
        return self._lease.holder()

    def ranks(self) -> list[int]:
        """The ranks that have a journal, ascending."""
        names = (re.fullmatch(r"rank-(\d+)\.jsonl", path.name) for path in (self.path / "journal").glob("*.jsonl"))
        return sorted(int(name[1]) for name in names if name is not None)

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        """What one rank's journal says, in order; lines that a crash tore are left out."""
        return read_events(self.journal(rank))

    def steps(self) -> list[dict[str, Any]]:
        """The step events of rank 0, ascending; of a step that was redone after a resume only the last."""
        return latest_steps(self.events())

    @property
    def last_step(self) -> int:
        """The number of the step recorded last, 0 before the first; reads only the journal's tail."""
        return last_step(self.journal())


def safe_name(text: str) -> str:
    """`text` as part of a directory's name: letters, digits, `_` and `-` only, at most 40 of them, never empty."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:40] or "task"


def _read_identity(record: Path) -> dict[str, Any]:
    """What run.json says. Raises RunError, in one line: it cannot be read, or is not a run's."""
    restore = "restore it or start a new run"
    try:
        identity = json.loads(read_small(record).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{record} cannot be read: {error}; {restore}") from error
    missing = [key for key in IDENTITY_KEYS if not isinstance(identity, dict) or key not in identity]
    if missing:
        raise RunError(f"{record} is not a run's: it lacks {', '.join(missing)}; {restore}")
    for key, kind in IDENTITY_KEYS.items():
        if type(identity[key]) is not kind:
            raise RunError(f"{record} is damaged: {key} is {identity[key]!r:.80}, no {kind.__name__}; {restore}")
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", identity["id"]):  # it is part of paths: in a host's memory, in a mirror
        raise RunError(f"{record} is damaged: id is {identity['id']!r:.80}, no run's; {restore}")
    found: dict[str, Any] = identity
    return found


def _new_identity(task_name: str, run_json: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": secrets.token_hex(8),
        "task": task_name,
        "name": task_name,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "attempts": 0,
    } | dict(run_json)


def _create_directory(path: Path, identity: Mapping[str, Any], config: Config) -> None:
    with refusing(path):
        if path.exists() and path.samefile("."):  # it would be gone below this process, its workers and the shell
            raise RunError(f"{path.absolute()} is the directory that this command runs in; name another with --run DIR")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            make_folders(temporary, ROOMS)
            write_json(temporary / "run.json", identity)
            write_config(config, temporary / "config.toml")
            sync(temporary / "config.toml")
            sync(temporary)
            temporary.rename(path)
            sync(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
