"""Programs trained as users train them: what sentinels say of them, and how that is counted."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from allranks.config_guard import SENTINELS
from allranks.verdict import FINDINGS
from allranks.verifying import watched
from allranks.verifying.corpus import Entry, read_corpus, read_entry
from allranks.verifying.watched import STEPS, Watched, count, is_task, watch, watch_all

CORPUS = Path(__file__).parents[2] / "corpus"
DUE = {  # program -> the sentinel that has to catch it, and the step in which it has to at the latest
    "S04_stream_of_all": ("samples", 4),
    "S05_numpy_in_loss": ("randomness", 4),
    "S06_seeds_in_loss": ("randomness", 4),
    "S12_layer_made_anew": ("linkage", 8),
    "S22_scheduler_of_its_own": ("schedule", 4),
    "S25_buffer_of_each_rank": ("replicas", 12),
    "S38_decay_of_one_rank": ("steps", 4),
    "S39_flipped_bit": ("replicas", 12),
}
SEEN = {  # wrong Task of corpus/, written for verify -> what is said of it where sentinels watch
    "S03_task_shards_itself": "missed",
    "S05_task_own_generator": "missed",
    "S09_task_mean": "refused",
    "S23_task_rate": "missed",
    "S25_task_local": "missed",
    "S29_task_not_coupled": "refused",
    "S30_task_metric_of_batches": "missed",
}
RESULTS = CORPUS.parent / "bench" / "results" / "watched.json"
TASKS = CORPUS.parent / "bench" / "results" / "watched_tasks.json"


def wrong_tasks() -> list[Entry]:
    """Of corpus/."""
    return [entry for entry in read_corpus(CORPUS) if not entry.clean and is_task(entry.path)]


def clean_tasks() -> list[Entry]:
    """Of corpus/ and the sets beside it, but for what is all watched together."""
    folders = (CORPUS, CORPUS / "heldout", CORPUS / "unseen")
    return [entry for folder in folders for entry in read_corpus(folder, {"clean"}) if is_task(entry.path)]


def test_every_kind_of_finding_is_a_sentinels() -> None:
    assert set(FINDINGS.values()) == set(SENTINELS)


def test_tasks_are_told_from_loops() -> None:
    assert is_task(CORPUS / "task_digits.py") and is_task(CORPUS / "watched" / "digits.py")
    assert not is_task(CORPUS / "classifier.py")


def test_the_folder_holds_what_is_due() -> None:
    entries = read_corpus(CORPUS / "watched")
    assert {entry.name for entry in entries if not entry.clean} == set(DUE)
    assert all(is_task(entry.path) for entry in entries)


def test_how_runs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Watched("a", "S5", "", 0, ("randomness",), 4, kinds=("S5", "S6"), cost=0.01),
        Watched("b", "S11", "", 93, ("replicas",), 16, kinds=("S39", "S11"), cost=0.02),
        Watched("c", "S30", "", 0),
        Watched("d", "clean", "", 0),
        Watched("e", "clean", "", 0, ("samples",), 3),
        Watched("f", "clean", "", 2),
        Watched("g", "S1", "", None, said="a loop"),
        Watched("h", "S9", "", 2, said="a mean", refused_for_it=True),
        Watched("i", "S9", "", 2, said="another"),
    ]
    outcomes = ["caught", "caught", "missed", "clean", "false alarm", "failed", "not watched", "refused", "failed"]
    assert [one.outcome for one in found] == outcomes
    assert count(found) == {
        **dict.fromkeys(outcomes, 1), "caught": 2, "failed": 2, "latest step": 16, "named rightly": 2,
        "of them first": 1, "median cost in % of a step": 1.5,
    }  # fmt: skip
    assert "median cost in % of a step" not in count(found[2:])
    document = found[1].to_json()
    assert (document["outcome"], document["named"], document["named_first"]) == ("caught", True, False)
    assert (document["kinds"], document["cost"]) == (("S39", "S11"), 0.02)


def test_of_a_program_that_is_not_trained_it_is_said_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def trained(entry: Entry, words: str, steps: int) -> Watched:
        asked.append((entry.name, words, steps))
        return Watched(entry.name, entry.kind, words, 0)

    monkeypatch.setattr(watched, "watch", trained)
    (tmp_path / "joined.py").write_text('"""Clean: a.\n\nverify: --nproc 2\n"""\nwith allranks.join() as w: ...\n')
    (tmp_path / "S01_far.py").write_text('"""S1: a.\n\ntwin: joined.py\nunseen: it takes a thousand hosts\n"""\n')
    paths = [CORPUS / "classifier.py", CORPUS / "task_digits.py", tmp_path / "joined.py", tmp_path / "S01_far.py"]
    entries = [read_entry(path) for path in paths]
    found = list(watch_all([entry for entry in entries if entry is not None], 7))
    told = [(one.name, one.outcome, one.said) for one in found if one.outcome == "not watched"]
    assert told == [
        ("classifier", "not watched", watched.RAW_LOOP),
        ("joined", "not watched", watched.JOINED_LOOP),
        ("S01_far", "not watched", "it takes a thousand hosts"),
    ]
    runs = ("--layout ddp --nproc 2", "--layout fsdp --nproc 2", "--layout tp=2")
    assert asked == [("task_digits", words, 7) for words in (*runs, "--layout ddp --nproc 2 train.precision=float16")]


def assert_due(found: Mapping[str, tuple[Sequence[str], int | None]]) -> None:
    """That each program is caught first by the sentinel that is due, and in time."""
    assert {name: sentinels[0] for name, (sentinels, _) in found.items()} == {n: s for n, (s, _) in DUE.items()}
    assert [name for name, (_, step) in found.items() if step is None or step > DUE[name][1]] == []


def test_in_the_stored_run_all_are_caught_in_time() -> None:
    rows = json.loads(RESULTS.read_text())["results"]
    assert_due({row["name"]: (row["sentinels"], row["step"]) for row in rows if row["kind"] != "clean"})


def test_in_the_stored_run_of_the_corpus_wrong_tasks_are_seen_as_they_are_pinned() -> None:
    rows = json.loads(TASKS.read_text())["results"]
    wrong = {row["name"]: row["outcome"] for row in rows if row["kind"] != "clean" and row["outcome"] != "not watched"}
    assert wrong == SEEN and SEEN.keys() == {entry.name for entry in wrong_tasks()}


@pytest.mark.full
@pytest.mark.distributed
def test_a_scheduler_of_its_own_is_caught_by_the_real_command() -> None:
    entry = read_entry(CORPUS / "watched" / "S22_scheduler_of_its_own.py")
    assert entry is not None
    found = watch(entry, "--layout ddp --nproc 2", 14)
    assert (found.outcome, found.sentinels, found.exit_code) == ("caught", ("schedule",), 0), found
    assert found.step is not None and found.step <= 3
    assert found.kinds == ("S22", "S23") and found.named_first
    assert found.cost is not None and 0 < found.cost < 1
    assert json.dumps(found.to_json())


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_all_that_is_wrong_is_caught_and_nothing_else() -> None:
    found = list(watch_all(read_corpus(CORPUS / "watched")))
    assert_due({one.name: (one.sentinels, one.step) for one in found if one.kind != "clean"})
    assert {one.outcome for one in found if one.kind == "clean"} == {"clean"}
    assert [one.name for one in found if one.kind != "clean" and not one.named] == []
    # DDP ends the program whose layer is made anew, a step after its sentinel: a run that fails has no cost.
    assert [one.name for one in found if one.cost is None] == ["S12_layer_made_anew"]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("entry", "words"),
    [pytest.param(one, words, id=f"{one.name} {words}") for one in clean_tasks() for words in one.runs],
)
def test_no_sentinel_accuses_a_clean_task(entry: Entry, words: str) -> None:
    found = watch(entry, words, STEPS)
    assert (found.outcome, found.sentinels, found.exit_code) == ("clean", (), 0), found


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("entry", wrong_tasks(), ids=lambda entry: entry.name)
def test_of_a_wrong_task_of_the_corpus_that_is_seen_which_is_pinned(entry: Entry) -> None:
    found = [watch(entry, words, STEPS) for words in entry.runs]
    assert {one.outcome for one in found} == {SEEN[entry.name]}, found
