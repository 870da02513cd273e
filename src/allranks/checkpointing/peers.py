"""A checkpoint in the memory of several hosts, every file on two of them: any one may go. It is whole on none.

    every rank           step-N.tmp-<token>/rank-R.safetensors, in the memory of its own host
    exchange             what each has written
    every rank           its file to a rank of the next host, which keeps it as kept-rank-R.safetensors
    exchange             whether all of them have come
    first of each host   manifest.json, COMMITTED; renamed to step-N, and the one before goes
    exchange             whether every host has it

One other host has each file, as in Gemini (Wang et al., SOSP 2023, https://doi.org/10.1145/3600006.3613145) with two
replicas. `joining.py` brings what is left of it to the disk.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from allranks.checkpointing.checkpoint import MANIFEST_FILE, Checkpoint, Header, discard, list_checkpoints, seal
from allranks.checkpointing.commit import check_errors, explain, merge, publish
from allranks.checkpointing.exchange import among_peers, broadcast_bytes, gather_bytes
from allranks.checkpointing.joining import KEPT
from allranks.checkpointing.manifest import FileRecord, Manifest, parse_manifest, render_manifest
from allranks.checkpointing.parts import Parts
from allranks.checkpointing.portion import Place, file_name, place_of
from allranks.checkpointing.reading import COMMITTED_FILE
from allranks.checkpointing.save import NOT_SAVED, gather_shares, why_refused, write_own
from allranks.checkpointing.tensor_file import OpenFile
from allranks.durable import sync, write_synced
from allranks.errors import CheckpointError


@final
@dataclass(frozen=True, slots=True)
class Hosts:
    """Which ranks share a memory.

    Attributes:
        rank: this one.
        members: of each host its ranks.
    """

    rank: int
    members: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> bool:
        """Whether this rank does for its host what one has to do."""
        return self.rank == self._ranks_beside(self.rank)[0]

    def keeper(self, rank: int) -> int | None:
        """Of the next host, who gets the file of `rank`; None: there is no other host."""
        if len(self.members) == 1:
            return None
        own = self._ranks_beside(rank)
        following = self.members[(self.members.index(own) + 1) % len(self.members)]
        return following[own.index(rank) % len(following)]

    def kept_by(self, rank: int) -> list[int]:
        """Whose files `rank` gets."""
        return [other for ranks in self.members for other in ranks if self.keeper(other) == rank]

    def bytes_beside(self, num_bytes: Sequence[int]) -> int:
        """Of files of so many bytes a rank, what lies in the memory of this rank's host."""
        own = self._ranks_beside(self.rank)
        kept = [other for ranks in self.members for other in ranks if self.keeper(other) in own]
        return sum(num_bytes[rank] for rank in (*own, *kept))

    def _ranks_beside(self, rank: int) -> tuple[int, ...]:
        return next(ranks for ranks in self.members if rank in ranks)


def save_on_hosts(
    directory: Path,
    *,
    header: Header,
    parts: Parts,
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    token: str,
    device: torch.device,
    tells: bool,
    before_commit: Callable[[], None],
    hosts: Hosts,
) -> Checkpoint:
    """Write `directory`/step-N on every host, and let the ones before go; arguments as of `save`, collective.

    Args:
        directory: in the memory of this rank's host; the other hosts' ones may have other names.

    Raises:
        CheckpointError: on every rank, naming rank, path and reason; what was there before is untouched.
        ProcessError: a peer was lost.
    """
    place = place_of(directory, header, token)
    portion, share = write_own(place, parts, rank, aliases, state, tells=tells)
    shares = gather_shares(share, group, device)
    answer = b""
    if shares:
        refused = why_refused(before_commit)
        try:
            if len(shares) != world_size:
                raise CheckpointError(f"{len(shares)} ranks save, {world_size} should")
            check_errors(shares)
            if refused is not None:
                raise refused
            manifest = merge(header, shares, portion.state, torch.__version__, str(place.target))
            answer = b"written" + render_manifest(manifest).encode()
        except Exception as error:
            answer = _refusal(place, explain(error, place.temporary)).encode()
    answer = broadcast_bytes(answer, group, device)
    try:
        if not answer.startswith(b"written"):
            raise CheckpointError(answer.decode())
        text = answer.removeprefix(b"written")
        manifest = parse_manifest(text, str(place.target / MANIFEST_FILE))
        for met in _pass_on(place.temporary, manifest, hosts, group, device):
            _agree(place, met, group, device)
        _agree(place, _name(place, text, hosts) if hosts.first else "", group, device, named=hosts.first)
    finally:
        shutil.rmtree(place.temporary, ignore_errors=True)
    if hosts.first:
        for path in list_checkpoints(directory):
            if path != place.target:
                shutil.rmtree(path, ignore_errors=True)
    return Checkpoint(place.target, manifest)


def first_word(word: str, group: dist.ProcessGroup | None, device: torch.device) -> str:
    """What the first rank that says anything says, on every rank; "" where none does. Collective."""
    words = gather_bytes(word.encode(), group, device)
    said = next((one for one in words if one), b"")
    return broadcast_bytes(said, group, device).decode()


def _agree(
    place: Place, error: str, group: dist.ProcessGroup | None, device: torch.device, *, named: bool = False
) -> None:
    """See that no rank has met an error. Raises CheckpointError, on every rank, and takes the name back."""
    wrong = first_word(error, group, device)
    if wrong:
        if named:
            with suppress(CheckpointError):
                discard(place.target)
        raise CheckpointError(_refusal(place, wrong))


def _refusal(place: Place, reason: str) -> str:
    """The same on every host, whatever its directory is called."""
    return f"{place.target.name} {NOT_SAVED} in the memory of hosts: {reason}; the one before is untouched"


def _pass_on(
    folder: Path, manifest: Manifest, hosts: Hosts, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[str, str]:
    """Send this rank's file to its keeper, and write those that it keeps itself; why either failed, or "".

    Who meets an error goes on sending and receiving: the others wait for it.
    """
    records = {rank: manifest.files.get(file_name(rank)) for ranks in hosts.members for rank in ranks}
    keeper, own = hosts.keeper(hosts.rank), records[hosts.rank]
    sent = _Sent(folder, file_name(hosts.rank), own if keeper is not None else None)
    kept = {rank: _Kept(folder / f"{KEPT}{file_name(rank)}", records[rank]) for rank in hosts.kept_by(hosts.rank)}
    most = max((len(record.chunks) for record in records.values() if record is not None), default=0)
    with closing(sent), among_peers("a copy went to another host's memory"):
        for number in range(most):
            data = sent.chunk(number)
            ops = [] if data is None else [dist.P2POp(dist.isend, data.to(device), keeper, group)]
            received = {}
            for rank, file in kept.items():
                if (length := file.length(number)) is not None:
                    received[rank] = torch.empty(length, dtype=torch.uint8, device=device)
                    ops.append(dist.P2POp(dist.irecv, received[rank], rank, group))
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
            for rank, buffer in received.items():
                kept[rank].write(number, buffer)
    for file in kept.values():
        file.close()
    lost = next((file.error for file in kept.values() if file.error), "")
    return _of_rank(hosts.rank, sent.error), _of_rank(hosts.rank, lost)


def _of_rank(rank: int, error: str) -> str:
    return f"rank {rank}: {error}" if error else ""


@final
class _Sent:
    """The chunks of a rank's own file; what cannot be read is sent as zeros, and told."""

    def __init__(self, folder: Path, name: str, record: FileRecord | None) -> None:
        self.error = ""
        self._record = record
        self._chunks = self._read(folder, name)

    def chunk(self, number: int) -> torch.Tensor | None:
        """The next one, which is number `number`; None: there are no more, or there is no file."""
        if self._record is None or number >= len(self._record.chunks):
            return None
        data = next(self._chunks, None)
        if data is None:
            return torch.zeros(self._record.chunks[number][1], dtype=torch.uint8)
        return torch.frombuffer(data, dtype=torch.uint8)

    def close(self) -> None:
        """Let the file go."""
        self._chunks.close()  # type: ignore[attr-defined]

    def _read(self, folder: Path, name: str) -> Iterator[memoryview]:
        assert self._record is not None
        try:
            with closing(OpenFile(folder, name, self._record)) as file:
                for _, data in file.chunks():
                    yield data
        except (CheckpointError, OSError) as error:
            self.error = explain(error, folder / name)


@final
class _Kept:
    """The file of another host's rank, as it comes."""

    def __init__(self, path: Path, record: FileRecord | None) -> None:
        self.error = ""
        self._path, self._record = path, record
        self._file: Any = None

    def length(self, number: int) -> int | None:
        """Of a chunk, in bytes; None: there are no more."""
        return None if self._record is None or number >= len(self._record.chunks) else self._record.chunks[number][1]

    def write(self, number: int, data: torch.Tensor) -> None:
        """Chunk `number`, each in its turn."""
        if self.error:
            return
        assert self._record is not None
        try:
            content = data.cpu().numpy().data
            if hashlib.sha256(content).hexdigest() != self._record.chunks[number][2]:
                raise CheckpointError(f"{self._path.name} came otherwise than it was sent")
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("xb")
            self._file.write(content)
        except (CheckpointError, OSError) as error:
            self.error = explain(error, self._path, self._record.bytes)

    def close(self) -> None:
        """All of it is there."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.error = self.error or explain(error, self._path)


def _name(place: Place, manifest: bytes, hosts: Hosts) -> str:
    """Commit what this host has; why that failed, or ""."""
    try:
        place.temporary.mkdir(parents=True, exist_ok=True)  # where a host's ranks hold nothing
        write_synced(place.temporary / MANIFEST_FILE, manifest.decode())
        write_synced(place.temporary / COMMITTED_FILE, seal(manifest).decode())
        replaced = publish(place.temporary, place.target, lambda: sync(place.target.parent))
    except OSError as error:
        return f"rank {hosts.rank}: {explain(error, place.temporary)}"
    if replaced is not None:
        with suppress(CheckpointError):
            discard(replaced)
    return ""
