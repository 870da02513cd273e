"""`allranks bench verify`: the real command on a fixed sample of our corpus, and under --full on all of it."""

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.bench_verify import RECORD
from allranks.cli.main import main
from allranks.verifying import watched
from allranks.verifying.corpus import Entry, read_corpus
from allranks.verifying.findings import KINDS, OTHER
from allranks.verifying.watched import Watched, is_task
from tests.commands import allranks

CORPUS = Path(__file__).parents[2] / "corpus"
PLACES = {  # where verify walks, and the kinds of what is found there
    "the start": "S12 S14 S26 S27 S32 S33",
    "samples": "S1 S4 S5 S24",
    "random numbers of a step": "S6 S7 S34",
    "gradients and statistics": "S8 S9 S10 S11 S13 S15 S16 S25 S29 S36 S37",
    "the update": "S22 S23 S28 S31 S35 S38 S39",
    "a load": "S17 S18 S19 S20 S21 S40",
    "an evaluation": "S2 S3 S30",
}
NUM_PARTS = 8
MISSED: dict[str, str] = {}  # program -> why verify does not catch it
NOT_VERIFIED: dict[str, str] = {}  # clean program -> why verify can say nothing of it
REFUSED = {"S09_task_mean", "S29_task_not_coupled"}  # Tasks whose loss says itself what is wrong with it, before a run
NAMED_OTHERWISE = {  # program -> the kinds it is found under
    "S03_task_shards_itself": ["S30"],  # what is reported of the evaluation is what is wrong then
}


def document(ran: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def sample() -> list[Entry]:
    """The programs that `make test` scores: of each place one loop, one Task that runs, and one clean loop.

    Each is the one of its sort with the smallest crc32 of its name: a new program seldom changes which are taken.
    """
    entries = [entry for entry in read_corpus(CORPUS) if entry.name not in REFUSED]
    loops = [entry for entry in entries if not is_task(entry.path)]
    wanted = [[e for e in loops if e.kind in kinds.split()] for kinds in PLACES.values()]
    wanted += [[e for e in entries if is_task(e.path) and not e.clean], [e for e in loops if e.clean]]
    return [min(some, key=lambda entry: zlib.crc32(entry.name.encode())) for some in wanted]


def test_every_kind_is_found_in_one_place() -> None:
    kinds = " ".join(PLACES.values()).split()
    assert sorted(kinds) == sorted(kind for kind in KINDS if kind != OTHER)


@pytest.mark.distributed
def test_a_fixed_sample_is_scored_and_not_run_twice(tmp_path: Path) -> None:
    entries = sample()
    (tmp_path / "corpus").mkdir()
    for entry in entries:
        text = entry.path.read_text().replace(f"\nverify: {entry.runs[0]}\n", "\nRUN\n")
        text = text.replace("\nverify: ", "\nas in: ").replace("\nRUN\n", f"\nverify: {entry.runs[0]}\n")
        (tmp_path / "corpus" / entry.path.name).write_text(text)
    for twin in {entry.twin for entry in entries if entry.twin} - {entry.path.name for entry in entries}:
        text = (CORPUS / twin).read_text()  # it is there to be named, and has its own test under --full
        (tmp_path / "corpus" / twin).write_text(text.replace("\nverify: ", "\nas in: "))
    first = document(allranks("bench", "verify", "--json", folder=tmp_path))
    score, wrong = first["score"], len(PLACES) + 1
    assert (score["wrong"], score["caught"], score["clean"], score["false_alarms"]) == (wrong, wrong, 1, 0), first
    assert (score["refused"], score["unverified"], score["unseen"]) == (0, 0, 0)
    assert {result["name"] for result in first["results"]} == {entry.name for entry in entries}
    assert_as_pinned(first["results"])
    assert {"date", "commit", "torch", "cores", "load", "load_after"} <= first["machine"].keys() and not first["known"]
    assert (tmp_path / RECORD).is_file()
    one = entries[0]
    again = allranks("bench", "verify", "--kinds", one.kind, folder=tmp_path)
    assert f"{one.name} {one.runs[0]}: caught {one.kind} (known)" in again.stderr
    assert "caught: 1 of 1 wrong programs" in again.stdout


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(1, NUM_PARTS + 1))
def test_every_program_is_judged_rightly(part: int, tmp_path: Path) -> None:
    shutil.copytree(CORPUS, tmp_path / "corpus", ignore=shutil.ignore_patterns("__pycache__"))
    words = ("bench", "verify", "--json", "--part", f"{part}/{NUM_PARTS}")
    found = document(allranks(*words, folder=tmp_path, check=None, limit=1700.0))
    wrong = [result for result in found["results"] if result["outcome"] in ("missed", "false alarm", "not verified")]
    excused = MISSED.keys() | NOT_VERIFIED.keys()
    unexpected = [result for result in wrong if result["name"] not in excused]
    assert not unexpected, json.dumps(unexpected)
    assert_as_pinned(found["results"])


UNLOOKED_AT = {  # folder -> how many programs are wrong there, and which of them are found under other kinds
    "heldout": (8, {"S04_overlapping_windows": ["other"]}),
    "unseen": (
        12,
        {
            "S09_task_padded_frames": ["other"],
            "S13_trust_of_own_heads": ["other"],
            "S29_task_grades_of_a_rank": ["S16"],
        },
    ),
}


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", UNLOOKED_AT)
def test_programs_that_verify_was_not_made_with_are_caught(folder: str, tmp_path: Path) -> None:
    """And no clean one is accused; what their kind is called is pinned, right or not."""
    ran = allranks("bench", "verify", str(CORPUS / folder), "--json", folder=tmp_path, check=None, limit=800.0)
    found = document(ran)
    number, otherwise = UNLOOKED_AT[folder]
    score = found["score"]
    assert (score["wrong"], score["caught"], score["false_alarms"], score["unverified"]) == (number, number, 0, 0)
    caught = [result for result in found["results"] if result["outcome"] == "caught"]
    assert {result["name"]: result["kinds"] for result in caught if not result["named_first"]} == otherwise


def assert_as_pinned(results: list[dict[str, Any]]) -> None:
    """Of these results, those are refused, and those named otherwise, of which it is known."""
    names = {result["name"] for result in results}
    assert {result["name"] for result in results if result["outcome"] == "refused"} == REFUSED & names
    caught = [result for result in results if result["outcome"] == "caught"]
    otherwise = {result["name"]: result["kinds"] for result in caught if not result["named_first"]}
    assert otherwise == {name: kinds for name, kinds in NAMED_OTHERWISE.items() if name in names}


def test_the_stored_run_is_as_pinned() -> None:
    assert_as_pinned(json.loads((CORPUS.parent / "bench" / "results" / "verify.json").read_text())["results"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["none"], "none is no folder of programs"),
        ([".", "--kinds", "S99"], "S99 is no kind"),
        (["."], "holds no program"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "verify", *words]) == 2
    err = capsys.readouterr().err
    assert told in err and len(err.strip().splitlines()) == 1


def test_the_exit_code_says_whether_anything_has_to_be_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text('"""Clean: a.\n\nverify: --nproc 1\n"""\nbuild = step = data = None\n')
    assert main(["bench", "verify", "."]) == 1  # a clean program that verify refuses
    assert "false alarms: 1 of 1 runs of clean programs" in capsys.readouterr().out


def test_a_program_that_is_broken_otherwise_than_it_says_is_not_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text('"""Clean: a.\n\nas in: --nproc 1\n"""\n')
    (tmp_path / "S08_a.py").write_text('"""S8: a.\n\ntwin: a.py\nverify: --nproc 2\n"""\nbuild = step = data = None\n')
    assert main(["bench", "verify", "."]) == 1
    out = capsys.readouterr().out
    assert "caught: 0 of 1 wrong programs" in out and "not verified: 1" in out


def test_sentinels_keep_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "verify", str(CORPUS / "watched"), "--sentinels", "--record", str(tmp_path / "kept.jsonl")]
    assert main(words) == 2
    assert "--record keeps what verify says" in capsys.readouterr().err


def test_what_sentinels_say_is_told_with_kind_cost_and_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Watched("a", "S5", "--nproc 2", 0, ("randomness",), 4, "drawn alike", 1.0, kinds=("S5", "S6"), cost=0.0123),
        Watched("b", "S25", "--nproc 2", 0, ("replicas",), 8, "apart", 1.0, kinds=("S39",), cost=0.02),
        Watched("c", "S1", "", None, said="a loop of its own"),
    ]
    monkeypatch.setattr(watched, "watch_all", lambda entries: iter(found))
    assert main(["bench", "verify", str(CORPUS / "watched"), "--sentinels"]) == 0
    out = capsys.readouterr().out
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    assert ["a", "--nproc 2", "caught", "randomness, step 4", "S5 S6", "1.23%", "1.0 s"] in rows
    assert ["b", "--nproc 2", "caught", "replicas, step 8", "S39 (not it)", "2.00%", "1.0 s"] in rows
    assert ["c", "not watched", "a loop of its own"] in rows
    assert main(["bench", "verify", str(CORPUS / "watched"), "--sentinels", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"date", "commit", "load", "load_after"} <= document["machine"].keys()
    assert document["score"]["not watched"] == 1 and document["score"]["named rightly"] == 1
    assert [(row["kinds"], row["cost"]) for row in document["results"][:2]] == [(["S5", "S6"], 0.0123), (["S39"], 0.02)]
