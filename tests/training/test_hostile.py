"""Checkpoints made by somebody who means harm: no code runs, nothing waits, nothing is allocated from their numbers.

The hostile one is the newest of a run whose older one is good. Each is looked at by all that reads checkpoints, in a
process of its own with an audit hook that sees what Python does there.
"""

import hashlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

from allranks.checkpointing.checkpoint import seal
from allranks.checkpointing.tensor_file import LENGTH
from allranks.cli.main import main
from allranks.errors import CheckpointError
from allranks.failure import Failure
from allranks.run import Run
from allranks.training.load import load
from allranks.training.newest import newest_of_run
from tests.distributed.pool import Pools
from tests.training.runs import events, start, train

pytestmark = pytest.mark.distributed

OLDER, NEWEST = "step-00000002", "step-00000004"
TENSORS = "rank-00000.safetensors"
FILES = ("COMMITTED", "manifest.json", TENSORS)
WEIGHT = "model.0.weight"  # the first in its file
MARK = "code-ran"
RUNS_CODE = ("pickle.", "marshal.", "exec", "compile", "import", "ctypes.", "code.")
LEAVES = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.", "socket.", "urllib.")
AS_ANY_RUN = ("ctypes.", "socket.gethostname")  # renameat2, and whose lease it is
MORE_MEMORY_BYTES = 256 << 20
TERABYTE = 1 << 40

Members = dict[str, Any]
Replace = Callable[[Path], object]


class Bomb:
    """Unpickling it makes a directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (MARK,)


def with_tensors(content: Callable[[Members, bytes], bytes]) -> Replace:
    """The tensors' file made from its header and its data, with a manifest and a seal that are right for it."""

    def make(checkpoint: Path) -> None:
        old = (checkpoint / TENSORS).read_bytes()
        begin = LENGTH.size + LENGTH.unpack_from(old)[0]
        new = content(json.loads(old[LENGTH.size : begin]), old[begin:])
        (checkpoint / TENSORS).write_bytes(new)
        chunks = [[0, len(new), hashlib.sha256(new).hexdigest()]] if new else []
        with_manifest(lambda m: m["files"].update({TENSORS: {"bytes": len(new), "chunks": chunks}}))(checkpoint)

    return make


def with_header(change: Callable[[Members, Members], object]) -> Replace:
    """The tensors' file with another header, of which its slots and its list of parts are changed."""

    def content(header: Members, data: bytes) -> bytes:
        parts = json.loads(header["__metadata__"]["parts"])
        change(header, parts)
        header["__metadata__"]["parts"] = json.dumps(parts)
        return with_length(json.dumps(header).encode(), data)

    return with_tensors(content)


def with_length(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """A file, which may lie about the length of its header."""
    return LENGTH.pack(len(header) if length is None else length) + header + data


def with_text(change: Callable[[str], str]) -> Replace:
    """The manifest with another text, sealed."""

    def make(checkpoint: Path) -> None:
        file = checkpoint / "manifest.json"
        file.write_text(change(file.read_text()))
        (checkpoint / "COMMITTED").write_bytes(seal(file.read_bytes()))

    return make


def with_manifest(change: Callable[[Members], object]) -> Replace:
    """The manifest with other members, sealed."""

    def render(text: str) -> str:
        members = json.loads(text)
        change(members)
        return json.dumps(members)

    return with_text(render)


def _to(file: str, replace: Callable[[Path], object]) -> Replace:
    """Another thing under the name of a file."""

    def make(checkpoint: Path) -> None:
        path = checkpoint / file
        path.rename(checkpoint.parent / "moved")
        replace(path)

    return make


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # a socket's path is at most 108 characters long
        server.bind(path.name)


def _make_long(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


def _say_long(checkpoint: Path) -> None:
    """A terabyte without a block on the disk, half of which is said to be the header."""
    first = LENGTH.pack(TERABYTE >> 1) + bytes((1 << 20) - LENGTH.size)
    (checkpoint / TENSORS).write_bytes(first)
    os.truncate(checkpoint / TENSORS, TERABYTE)
    starts = range(len(first), TERABYTE, 1 << 26)
    chunks = [[0, len(first), hashlib.sha256(first).hexdigest()]]
    chunks += [[at, min(1 << 26, TERABYTE - at), "0" * 64] for at in starts]
    with_manifest(lambda m: m["files"].update({TENSORS: {"bytes": TERABYTE, "chunks": chunks}}))(checkpoint)


IN_PLACE: dict[str, Callable[[Path], object]] = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "what torch saves": lambda path: torch.save(Bomb(), path),
    "the content and a pickle": lambda path: path.write_bytes(
        (path.parent.parent / "moved").read_bytes() + pickle.dumps(Bomb())
    ),
    "a link to secrets": lambda path: path.symlink_to("/etc/passwd"),
    "a link to its own content": lambda path: path.symlink_to(path.parent.parent / "moved"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a socket": _listen,
    "a terabyte": _make_long,
}
"""What stands under the name of each file in turn; COMMITTED and the manifest are as they were but for that."""

SEALED: dict[str, Replace] = {
    **{
        f"header of {length}": with_tensors(lambda h, d, n=length: with_length(json.dumps(h).encode(), d, n))  # type: ignore[misc]
        for length in (0, 1, 10**8, 1 << 60, (1 << 63) + 1, (1 << 64) - 1)
    },
    "header of half a terabyte": _say_long,
    "pickle for a header": with_tensors(lambda h, d: with_length(pickle.dumps(Bomb()), d)),
    "header nested deep": with_tensors(lambda h, d: with_length(b"[" * 300_000, d)),
    "header, one key twice": with_tensors(lambda h, d: with_length(json.dumps(h).encode()[:-1] + b',"x":0,"x":0}', d)),
    "header of no text": with_tensors(lambda h, d: with_length(b"\xff\xfe\x00", d)),
    "header, 100,000 digits": with_tensors(lambda h, d: with_length(b'{"x": %s}' % (b"9" * 100_000), d)),
    "offsets overlap": with_header(lambda h, p: h["model.0.bias"].update(data_offsets=h[WEIGHT]["data_offsets"])),
    "offset negative": with_header(lambda h, p: h[WEIGHT].update(data_offsets=[-8, 40])),
    "offsets backwards": with_header(lambda h, p: h[WEIGHT].update(data_offsets=[48, 0])),
    "offset of 2^63": with_header(lambda h, p: h[WEIGHT].update(data_offsets=[1 << 63, (1 << 63) + 48])),
    "offset no number": with_header(lambda h, p: h[WEIGHT].update(data_offsets=[float("nan"), 48])),
    "shape huge": with_header(lambda h, p: h[WEIGHT].update(shape=[1 << 47, 1 << 47])),
    "shape 1e308": with_header(lambda h, p: h[WEIGHT].update(shape=[1e308, 1])),
    "dtype unknown": with_header(lambda h, p: h[WEIGHT].update(dtype="object")),
    "part elsewhere": with_header(lambda h, p: p[WEIGHT].update(offset=[1 << 47, 0])),
    "parts a pickle": with_tensors(
        lambda h, d: with_length(json.dumps(h | {"__metadata__": {"parts": repr(pickle.dumps(Bomb()))}}).encode(), d)
    ),
    "manifest a pickle": with_text(lambda text: repr(pickle.dumps(Bomb()))),
    "manifest nested deep": with_text(lambda text: '{"state":' * 100_000),
    "manifest, one key twice": with_text(lambda text: text.replace('"schema": 1', '"schema": 1, "schema": 1')),
    "manifest, 100,000 digits": with_text(lambda text: '{"schema": %s}' % ("9" * 100_000)),
    "manifest with no number": with_text(lambda text: text.replace('"step": 4', '"step": NaN')),
    "manifest of lone surrogates": with_text(lambda text: text.replace('"single"', '"\\ud800"')),
    "file outside": with_manifest(lambda m: m["files"].update({f"../{OLDER}/{TENSORS}": m["files"].pop(TENSORS)})),
    "file of the system": with_manifest(lambda m: m["files"].update({"/etc/passwd": m["files"].pop(TENSORS)})),
    "file of 2^62 bytes": with_manifest(lambda m: m["files"][TENSORS].update(bytes=1 << 62)),
    "chunk huge": with_manifest(lambda m: m["files"][TENSORS].update(chunks=[[0, 1 << 40, "0" * 64]], bytes=1 << 40)),
    "tensor huge": with_manifest(lambda m: m["tensors"][WEIGHT].update(shape=[1 << 48] * 32)),
    "tensor of another type": with_manifest(lambda m: m["tensors"][WEIGHT].update(dtype="__reduce__")),
    "another run": with_manifest(lambda m: m.update(run="\x1b[31m\n" * 9)),
}  # fmt: skip
"""What is hostile and committed properly: every digest is right, so that only the content itself gives it away."""

CASES: dict[str, Replace] = {
    **{f"{file} is {what}": _to(file, replace) for file in FILES for what, replace in IN_PLACE.items()},
    **SEALED,
}


def _instead(file: str, replace: Callable[[Path], object]) -> Replace:
    """Another thing under the name of a run's file or folder."""

    def make(run: Path) -> None:
        path = run / file
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.rename(path.parent.parent / "moved")
        replace(path)

    return make


RUN_FILES = (
    *("run.json", "config.toml", "plan.json", "lease", "journal/rank-00000.jsonl", "logs/rank-00000.log"),
    "logs/failure-00000.json",
)
RUN_FOLDERS = ("journal", "logs", "checkpoints", "tensorboard", "traces")
OF_WRONG_TYPES = (
    *(
        b"",
        b"{",
        b"[" * 200_000,
        b'{"event": "step", "step": %s}' % (b"9" * 100_000),
        bytes(range(256)),
        b'{"a": 1e999}',
    ),
    b'{"rank": "a", "host": 3, "pid": null, "time": "x", "exit_code": [], "message": 5, "traceback": {}, "signal": 1}',
    b"""{"event": "step", "step": "x"}
{"event": "step", "step": 1, "loss": "a", "lr": [], "seconds": {}, "t": 1e300}
{"event": "verdict", "kind": 3, "what": null, "evidence": 7, "next": []}
{"event": "start", "world_size": "x", "t": -1e300}
{"event": "resume", "step": null}
{"event": "evaluation", "step": [], "metrics": 3}
{"event": "step", "step": 1%s}
{"event": "end", "step": "y", "reason": {}}
"""
    % (b"0" * 400),
)
RUN_CASES: dict[str, Replace] = {
    **{
        f"{file} is {what}": _instead(file, replace)
        for file in RUN_FILES
        for what, replace in IN_PLACE.items()
        if what != "a terabyte" or not file.endswith(("log", "jsonl"))  # which may be long
    },
    **{
        f"{folder} is {what}": _instead(folder, IN_PLACE[what])
        for folder in RUN_FOLDERS
        for what in ("a pickle", "a link to itself", "a link to nothing", "a link to zeros", "a pipe", "a socket")
    },
    **{
        f"{file} holds {content[:40]!r}": _instead(file, lambda path, c=content: path.write_bytes(c))  # type: ignore[misc]
        for file in RUN_FILES
        for content in OF_WRONG_TYPES
    },
}
"""What stands under the name of each file and folder of a run in turn."""


def fill(folder: Path, cases: Mapping[str, Replace], below: str) -> Path:
    """A folder with a run for every case, named by its number, a good one, and one with a plain damage."""
    words = ("train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "evaluate.every=0")
    assert start("Curve", folder / "good", *words) == 0
    here = Path.cwd()
    Failure(0, "here", 1, 1.0, 1, "RuntimeError: no").write(folder / "good" / "logs")
    (folder / "good" / "logs" / "rank-00000.log").write_text("RuntimeError: no\n")
    (folder / "good" / "plan.json").write_text("{}")
    for number, replace in enumerate(cases.values()):
        shutil.copytree(folder / "good", folder / str(number))
        replace(folder / str(number) / below)
    os.chdir(here)
    shutil.copytree(folder / "good", folder / "damaged")
    os.truncate(folder / "damaged" / "checkpoints" / NEWEST / TENSORS, 100)
    return folder


def hostile(folder: Path, cases: Mapping[str, Replace]) -> Path:
    """A run for each of these hostile checkpoints."""
    return fill(folder / "hostile", cases, f"checkpoints/{NEWEST}")


ONE_IN = 4  # of these cases `make test` has


def command(*words: object) -> tuple[int, str]:
    """A command's exit code and all that it said."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        code = main([*map(str, words)])
    return code, out.getvalue()


def look(run: Path) -> dict[str, tuple[int, str]]:
    """Ask everything that reads checkpoints: what each answered, as a code or a step, and what it said."""
    checkpoint, skipped = newest_of_run(run / "checkpoints", Run.open(run).id)
    assert checkpoint is not None
    said = {"newest": (checkpoint.step, "\n".join(skipped))}
    for word in ("verify", "list", "show"):
        said[word] = command("checkpoint", word, run)
        said[f"{word} --json"] = command("checkpoint", word, run, "--json")
    said["export"] = command("checkpoint", "export", run, run / "model.safetensors")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = load(run)
    assert isinstance(model, torch.nn.Module)
    said["load"] = len(warned), "\n".join(str(warning.message) for warning in warned)
    shutil.rmtree(run / "checkpoints" / OLDER)
    try:
        newest_of_run(run / "checkpoints", Run.open(run).id)
    except CheckpointError as error:
        said["alone"] = error.exit_code, str(error)
    return said


def resumed(run: Path) -> dict[str, tuple[int, str]]:
    """What a resume does, and what the newest checkpoints are afterwards."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        code = train(None, "train.steps=4", resume=run)
    steps = [event["step"] for event in events(run, "resume")]
    return {"resume": (code, out.getvalue()), "from": (sum(steps), ""), "verify": command("checkpoint", "verify", run)}


def watch(folder: Path, cases: Sequence[str], ask: Callable[[Path], Any], but: Sequence[str] = ()) -> Any:
    """Ask about each of these runs: the answers, what the hook saw but for some, and by how much memory grew."""
    os.chdir(folder)
    seen: list[str] = []
    for run in ("good", "damaged"):
        ask(Path(shutil.copytree(folder / run, folder / f"{run} copy")))  # whatever is imported late is imported now

    def note(event: str, args: tuple[object, ...]) -> None:
        if event.startswith((*RUNS_CODE, *LEAVES)) and not event.startswith(tuple(but)):
            first = next(iter(args), None)  # may be a library, of which every question is told here, too
            told = first.co_filename if isinstance(first, CodeType) else first if isinstance(first, str) else ""
            seen.append(f"{event} {told}")

    sys.addaudithook(note)
    pickle.loads(pickle.dumps(len))
    assert seen.pop().startswith("pickle.find_class") and not seen, "the hook sees"
    before, answers = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, dict[str, Any]()
    for number, case in enumerate(cases):
        try:
            answers[case] = ask(folder / str(number))
        except BaseException as error:
            error.add_note(f"where {case}")
            raise
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return answers, seen, grown


def suspects(case: str) -> tuple[str, ...]:
    """The files one of which a message has to name; a manifest and its seal are a pair."""
    file = next((file for file in FILES if case.startswith(f"{file} is ")), "")
    return (file,) if file == TENSORS else ("manifest.json", "COMMITTED") if file else (NEWEST,)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(1, ONE_IN))])
def test_no_hostile_file_runs_code_or_ends_a_command_otherwise_than_in_a_line(
    pool: Pools, tmp_path: Path, first: int
) -> None:
    cases = dict(list(CASES.items())[first::ONE_IN])
    folder = hostile(tmp_path, cases)
    (found,) = pool(1).run_alone(watch, folder, list(cases), look, timeout=240.0)
    answers, seen, grown = found
    assert answers.keys() == cases.keys() and seen == [] and not (folder / MARK).exists()
    assert grown < MORE_MEMORY_BYTES
    for case, said in answers.items():
        step, skipped = said["newest"]
        assert step == 2 and "\n" not in skipped and len(skipped) < 1500, (case, skipped)
        assert any(name in skipped for name in suspects(case)), (case, skipped)
        assert "root:" not in str(said) and "\x1b" not in skipped + said["verify"][1], case
        assert said["load"] == (1, f"{OLDER} is loaded, not the newest: {skipped}"), case
        if case != "another run":  # a checkpoint by itself is good, whosever it is
            assert said["verify"][0] == said["verify --json"][0] == said["export"][0] == 1, (case, said)
            assert re.search(rf"{NEWEST}\b(?!.*: good)", said["verify"][1].splitlines()[0]), (case, said["verify"])
            assert ": good (" in said["verify"][1].splitlines()[-1] and said["verify"][1].count("\n") == 2, case
            assert said["export"][1].count("\n") == 1, (case, said["export"])
        code, refused = said["alone"]
        assert code == 78 and "holds no good checkpoint" in refused and "\n" not in refused, case
        assert {said[word][0] for word in ("list", "list --json", "show", "show --json")} <= {0, 1}, case


def read_all(run: Path) -> dict[str, tuple[int, str]]:
    """Every command that reads a run: what it answered."""
    words = (
        *(
            ("explain", run),
            ("report", run),
            ("report", run, "--json"),
            ("report", run, "good"),
            ("report", "good", run),
        ),
        *(("checkpoint", word, run) for word in ("list", "show", "verify")),
        ("checkpoint", "diff", run, "good"),
    )
    return {" ".join(map(str, one[:2])) + f" {len(one)}": command(*one) for one in words}


@pytest.mark.full
def test_whatever_stands_in_a_run_its_readers_end_with_an_answer_or_a_line(pool: Pools, tmp_path: Path) -> None:
    folder = fill(tmp_path / "runs", RUN_CASES, ".")
    (found,) = pool(1).run_alone(watch, folder, list(RUN_CASES), read_all, AS_ANY_RUN, timeout=300.0)
    answers, seen, grown = found
    assert seen == [] and not (folder / MARK).exists()
    assert grown < MORE_MEMORY_BYTES
    for case, said in answers.items():
        for asked, (code, told) in said.items():
            assert code in (0, 1, 2, 3, 78) and "Traceback" not in told, (case, asked, told)
            if code in (2, 78) and "--json" not in told:
                assert told.splitlines()[-1].startswith("allranks: error: "), (case, asked, told)


@pytest.mark.full
def test_a_resume_passes_over_every_hostile_checkpoint_and_writes_a_good_one_in_its_place(
    pool: Pools, tmp_path: Path
) -> None:
    """But of another run's, whose place nobody takes: the run ends with a line when it comes to that step."""
    cases = {case: replace for case, replace in CASES.items() if case != "another run"}
    folder = hostile(tmp_path, cases)
    (found,) = pool(1).run_alone(watch, folder, list(cases), resumed, AS_ANY_RUN, timeout=300.0)
    answers, seen, grown = found
    assert seen == [] and not (folder / MARK).exists()
    assert grown < MORE_MEMORY_BYTES
    for case, said in answers.items():
        code, told = said["resume"]
        passed_over = [line for line in told.splitlines() if "passed over a newer checkpoint" in line]
        assert code == 0 and said["from"] == (2, ""), (case, said)
        assert len(passed_over) == 1 and any(name in passed_over[0] for name in suspects(case)), (case, passed_over)
        assert said["verify"][0] == 0 and said["verify"][1].count(": good (") == 2, (case, said["verify"])


def refused_to_nobody(folder: Path) -> tuple[int | None, list[str], int, str]:
    """What is taken, passed over and said where the newest may not be read, by a user who is nobody special."""
    os.chdir(folder)
    run = Path("run")
    for _ in range(2):  # whatever is imported late is imported by who may read it
        checkpoint, skipped = newest_of_run(run / "checkpoints", Run.open(run).id)
        code, said = command("checkpoint", "verify", run)
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
    return None if checkpoint is None else checkpoint.step, skipped, code, said


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_may_not_be_read_is_named(pool: Pools, tmp_path: Path, file: str) -> None:
    assert start("Curve", tmp_path / "run", "train.steps=4", "checkpoint.every=2", "evaluate.every=0") == 0
    (tmp_path / "run" / "checkpoints" / NEWEST / file).chmod(0)
    tmp_path.chmod(0o755)
    ((step, skipped, code, said),) = pool(1).run_alone(refused_to_nobody, tmp_path)
    assert step == 2 and len(skipped) == 1 and f"{file}: Permission denied" in skipped[0]
    assert code == 1 and said.splitlines()[0] == skipped[0] and ": good (" in said.splitlines()[1]
