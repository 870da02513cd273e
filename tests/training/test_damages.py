"""A thousand damages to a checkpoint that two ranks have written: each is found, named, and an older one is taken.

Every byte of all four files of a checkpoint counts, so each damage must be found, without exception: manifest.json is
compared with COMMITTED, COMMITTED byte by byte with what it must be, and each rank's file, header and data, with the
SHA-256 of its chunks. What is no content of a file (its times, its owner) and what a manifest does not name (other
files in the directory, the lock that readers hold) is no part of the checkpoint, and is not damaged here.
"""

import io
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from allranks.run import Run
from allranks.training.newest import newest_of_run
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, events, same_run, train, train_outside

pytestmark = pytest.mark.distributed

DAMAGES, PART = 1000, 100
QUICK_DAMAGES = 80  # so that each of four files has every kind
OLDER, NEWEST = "step-00000002", "step-00000004"
SEALED = {"manifest.json", "COMMITTED"}
"""If they do not fit together either of them may be the damaged one: only the manifest's name is told then."""

Files = Mapping[str, bytes]  # name -> content, of a whole checkpoint
Damaged = dict[str, bytes | None]  # name -> what is there instead, None: nothing


@pytest.fixture(scope="module")
def made(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, each with a file of its own, and checkpoints of steps 2 and 4; not to be changed."""
    run = tmp_path_factory.mktemp("made") / "run"
    words = (*QUICK, "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "evaluate.every=0")
    assert train_outside(pool, 2, "Curve", *words, run=run, layout="fsdp") == [0, 0]
    assert sorted(contents(run, NEWEST)) == ["COMMITTED", "manifest.json", *(f"rank-0000{n}.safetensors" for n in "01")]
    return run


def contents(run: Path, step: str) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {path.name: path.read_bytes() for path in (run / "checkpoints" / step).iterdir()}


def a_place(draw: random.Random, content: bytes | bytearray) -> int:
    """A byte of a file: in front, in the length of a header, in what comes first, at the end, or anywhere."""
    low, high = draw.choice([(0, 1), (0, 8), (0, 512), (len(content) - 8, len(content)), (0, len(content))])
    return draw.randrange(low, min(high, len(content)))


def flip(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """One bit."""
    content = bytearray(files[name])
    content[a_place(draw, content)] ^= 1 << draw.randrange(8)
    return {name: bytes(content)}


def truncate(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """To no byte, to one byte less, or anywhere."""
    length = len(files[name])
    return {name: files[name][: draw.choice([0, length - 1, a_place(draw, files[name]), draw.randrange(length)])]}


def append(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """Bytes at the end: one that a text would not notice, zeros, or noise."""
    count = draw.choice([1, 8, 4096])
    return {name: files[name] + draw.choice([b"\n", b" ", bytes(count), draw.randbytes(count), files[name]])}


def blank(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """A block of zeros, as a disk gives back that has lost one; from a byte on that was none."""
    content = bytearray(files[name])
    start = a_place(draw, content)
    while not content[start]:
        start = draw.randrange(len(content))
    stop = min(len(content), start + draw.choice([1, 8, 64, 512, 4096]))
    content[start:stop] = bytes(stop - start)
    return {name: bytes(content)}


def exchange(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """Two files have each other's names."""
    other = draw.choice(sorted(files.keys() - {name}))
    return {name: files[other], other: files[name]}


def lose(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """A file is missing."""
    return {name: None}


def take_anothers(draw: random.Random, name: str, files: Files, older: Files) -> Damaged:
    """The file of that name of the checkpoint before."""
    return {name: older[name]}


KINDS: dict[Callable[[random.Random, str, Files, Files], Damaged], int] = {
    flip: 10, truncate: 4, blank: 2, append: 1, exchange: 1, lose: 1, take_anothers: 1,
}  # fmt: skip
"""With how many of twenty damages are of each."""


def damage(number: int, files: Files, older: Files) -> tuple[str, Damaged]:
    """The damage of that number, which is the same every time: its kind, and what it leaves where."""
    draw = random.Random(number)
    turn, place = divmod(number, sum(KINDS.values()))
    kind = [kind for kind, count in KINDS.items() for _ in range(count)][place]
    return kind.__name__, kind(draw, sorted(files)[turn % len(files)], files, older)


def put(run: Path, files: Files, damaged: Damaged) -> None:
    """Make the newest checkpoint what it was, and damage it."""
    shutil.rmtree(run / "checkpoints" / NEWEST)
    (run / "checkpoints" / NEWEST).mkdir()
    for name, content in {**files, **damaged}.items():
        if content is not None:
            (run / "checkpoints" / NEWEST / name).write_bytes(content)


def verified(path: Path) -> tuple[int, dict[str, str | None]]:
    """What `allranks checkpoint verify` says of a run or a checkpoint: its exit code, and each one's damage."""
    with redirect_stdout(io.StringIO()) as out:
        code = main(["checkpoint", "verify", str(path), "--json"])
    document: dict[str, Any] = json.loads(out.getvalue())
    return code, {Path(row["path"]).name: row["damage"] for row in document["checkpoints"]}


def names_it(said: str, damaged: Damaged) -> bool:
    """Whether a message is one line that names a damaged file."""
    suspects = damaged.keys() | (SEALED if SEALED & damaged.keys() else set())
    return "\n" not in said and any(name in said for name in suspects)


def check(run: Path, damaged: Damaged) -> None:
    """A resume takes the checkpoint before, and says why; `verify` finds it, too. Both name the file."""
    checkpoint, skipped = newest_of_run(run / "checkpoints", Run.open(run).id)
    assert checkpoint is not None and checkpoint.path.name == OLDER
    assert len(skipped) == 1 and NEWEST in skipped[0] and names_it(skipped[0], damaged), skipped
    # Without COMMITTED `verify RUN` takes a directory for one that was never finished, unless it is named itself.
    lost = damaged.get("COMMITTED", b"") is None
    code, damages = verified(run / "checkpoints" / NEWEST if lost else run)
    assert code == 1 and damages.pop(NEWEST, None) is not None, damages
    assert damages == ({} if lost else {OLDER: None})


def find_all(made: Path, folder: Path, numbers: Iterable[int]) -> Counter[str]:
    """Damage a copy of a run in each of these ways; how many were found, by kind. AssertionError: one was not."""
    run = folder / "run"
    shutil.copytree(made, run)
    files, older, found = contents(made, NEWEST), contents(made, OLDER), Counter[str]()
    for number in numbers:
        kind, damaged = damage(number, files, older)
        assert all(content != files[name] for name, content in damaged.items()), f"damage {number} changes nothing"
        put(run, files, damaged)
        try:
            check(run, damaged)
        except BaseException as error:
            error.add_note(f"damage {number}: {kind} of {', '.join(damaged)}")
            raise
        found[kind] += 1
    put(run, files, {})
    assert verified(run) == (0, {NEWEST: None, OLDER: None}), "and what is whole again is good again"
    return found


def test_eighty_damages_are_found_and_the_older_one_is_taken(made: Path, tmp_path: Path) -> None:
    found = find_all(made, tmp_path, range(QUICK_DAMAGES))
    assert found == {kind.__name__: 4 * count for kind, count in KINDS.items()}


@pytest.mark.full
@pytest.mark.parametrize("part", range(DAMAGES // PART))
def test_a_thousand_damages_are_found(
    made: Path, tmp_path: Path, part: int, record_property: Callable[[str, object], None]
) -> None:
    """In parts, so that a full run that was ended goes on behind those that passed."""
    found = find_all(made, tmp_path, range(part * PART, (part + 1) * PART))
    record_property("found", found.total())
    print(f"{found.total()} of {PART} found:", ", ".join(f"{count} {kind}" for kind, count in found.items()))


def damaged_copy(made: Path, folder: Path, kind: str) -> tuple[Path, Damaged]:
    """A copy of the run with the first damage of that kind in its newest checkpoint."""
    run = Path(shutil.copytree(made, folder / "run"))
    files, older = contents(made, NEWEST), contents(made, OLDER)
    damages = (damage(number, files, older) for number in range(DAMAGES))
    damaged = next(damaged for name, damaged in damages if name == kind)
    put(run, files, damaged)
    return run, damaged


def test_a_resume_says_what_it_passes_over(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, damaged = damaged_copy(made, tmp_path, "flip")
    assert train(None, "train.steps=4", resume=run) == 0
    warnings = [line for line in "".join(capfd.readouterr()).splitlines() if "passed over a newer checkpoint" in line]
    assert len(warnings) == 1 and names_it(warnings[0], damaged), warnings
    assert [event["step"] for event in events(run, "resume")] == [2]
    assert verified(run) == (0, {NEWEST: None, OLDER: None}), "the damaged one was written anew"


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_a_resume_is_bitwise_the_run_without_the_damage(pool: Pools, made: Path, tmp_path: Path, kind: str) -> None:
    run, _ = damaged_copy(made, tmp_path, kind)
    assert train_outside(pool, 2, None, "train.steps=4", resume=run, layout="fsdp") == [0, 0]
    assert [event["step"] for event in events(run, "resume")] == [2]
    same_run(made, run, 4)
    assert verified(run)[0] == 0
