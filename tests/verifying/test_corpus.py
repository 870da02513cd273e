"""What a program of the corpus says of itself, and that ours hold what the docs say of them."""

import difflib
from collections import Counter
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.verifying.corpus import CLEAN, Entry, part_of, read_corpus, read_entry, read_kinds, read_run
from allranks.verifying.findings import KINDS, OTHER

CORPUS = Path(__file__).parents[2] / "corpus"
MOST_CHANGED_LINES = 20


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text('"""' + "\n".join(lines) + '\n"""\n\nx = 1\n')
    return path


def test_a_program_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, "right.py", "Clean: right.", "", "verify: --nproc 2", "verify: --nproc 4")
    wrong = write(tmp_path, "S08_means.py", "S8: means of means.", "", "twin: right.py", "verify: --nproc 2")
    entry = read_entry(wrong)
    assert entry == Entry(wrong, "S8", "means of means.", "right.py", ("--nproc 2",))
    refused = write(tmp_path, "S09_mean.py", "S9: a mean.", "", "twin: right.py", "verify: ddp=1", "refused: a mean of")
    assert read_entry(refused) == Entry(refused, "S9", "a mean.", "right.py", ("ddp=1",), refused="a mean of")
    refused.unlink()
    write(tmp_path, "blocks.py", "Blocks that others import.")
    assert [(e.name, e.kind, len(e.runs)) for e in read_corpus(tmp_path)] == [
        ("S08_means", "S8", 1),
        ("right", CLEAN, 2),
    ]
    assert [e.name for e in read_corpus(tmp_path, {"clean"})] == ["right"]


@pytest.mark.parametrize(
    ("name", "lines", "told"),
    [
        ("S08_a.py", ["S8: a.", "verify: --nproc 2"], "has to name a clean program"),
        ("S08_a.py", ["S8: a.", "twin: none.py", "verify: --nproc 2"], "'none.py'"),
        ("S41_a.py", ["S41: a.", "twin: S41_a.py", "verify: --nproc 2"], "S41 is none of the 40 kinds"),
        ("a.py", ["Clean: a.", "unseen: it is not there"], "a clean program has no"),
        ("S08_a.py", ["S8: a.", "twin: S08_a.py", "verify: --nproc 2", "unseen: hm"], "exclude each other"),
        ("S08_a.py", ["S8: a.", "twin: S08_a.py", "unseen: hm", "refused: a mean"], "`refused:` says how"),
        ("a.py", ["Clean: a.", "verify: --nproc 2", "refused: a mean"], "is never `unseen:` or `refused:`"),
        ("a.py", ["Clean: a.", "verify: --gpus 2"], "--gpus: expected --layout"),
        ("a.py", ["Clean: a.", "verify: --nproc two"], "expected a number"),
        ("a.py", ["Clean: a.", "verify: --nproc 0"], "--nproc 0: give at least 1"),
        ("a.py", ["Clean: a.", "verify: --nproc 2 task.text='a"], "no closing quotation"),
    ],
)
def test_a_program_that_contradicts_itself_is_refused(name: str, lines: list[str], told: str, tmp_path: Path) -> None:
    write(tmp_path, name, *lines)
    with pytest.raises(ConfigError, match=told):
        read_corpus(tmp_path)


def test_a_folder_is_no_program_whatever_its_name_is(tmp_path: Path) -> None:
    write(tmp_path, "right.py", "Clean: right.", "", "verify: --nproc 2")
    (tmp_path / "old.py").mkdir()
    assert [entry.name for entry in read_corpus(tmp_path)] == ["right"]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of programs"):
        read_corpus(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no program with a line `verify:`"):
        read_corpus(tmp_path)
    write(tmp_path, "right.py", "Clean: right.", "verify: --nproc 2")
    with pytest.raises(ConfigError, match="no program of S8"):
        read_corpus(tmp_path, {"S8"})
    (tmp_path / "right.py").write_text("def")
    with pytest.raises(ConfigError, match=r"right\.py is not Python"):
        read_corpus(tmp_path)


def test_words_of_a_run_are_those_of_the_command(tmp_path: Path) -> None:
    entry = Entry(tmp_path / "a.py", CLEAN, "a")
    request, steps = read_run(entry, "--layout tp=2 --nproc 4 --steps 3 train.precision=bfloat16")
    assert (request.layout, request.nproc, steps, request.overrides) == ("tp=2", 4, 3, ("train.precision=bfloat16",))
    assert request.task_spec == str(tmp_path / "a.py") and request.device == "cpu"
    assert read_run(entry, "")[1] == 4


def test_kinds_and_parts() -> None:
    assert read_kinds("S05, s12,clean") == {"S5", "S12", "clean"} and read_kinds("") == frozenset()
    for wrong in ("S41", "other", "five"):
        with pytest.raises(ConfigError, match="is no kind"):
            read_kinds(wrong)
    entries = [Entry(Path(f"{number}.py"), CLEAN, "") for number in range(7)]
    parts = [part_of(entries, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(e.name for part in parts for e in part) == [e.name for e in entries]
    for text in ("0/3", "4/3", "one"):
        with pytest.raises(ConfigError, match="--part"):
            part_of(entries, text)


def change_of(entry: Entry) -> tuple[str, ...]:
    """The lines in which a wrong program and its twin differ, or how it is run where there are none."""
    texts = [path.read_text().partition('"""\n\n')[2] for path in (entry.path.parent / entry.twin, entry.path)]
    right, wrong = (text.splitlines() for text in texts)
    return tuple(line for line in difflib.ndiff(right, wrong) if line[:1] in "+-") or entry.runs


def test_every_kind_has_two_programs_and_thirty_are_clean() -> None:
    entries = read_corpus(CORPUS)
    count = Counter(entry.kind for entry in entries)
    assert {kind for kind in KINDS if kind != OTHER} <= set(count)
    assert min(count[kind] for kind in KINDS if kind != OTHER) >= 2 and count[CLEAN] >= 30
    assert not [entry.name for entry in entries if not entry.what.endswith(".")]
    changes = Counter((entry.kind, change_of(entry)) for entry in entries if not entry.clean)
    assert [kind for (kind, _), number in changes.items() if number > 1] == [], "two programs make one and the same"


@pytest.mark.parametrize("entry", [e for e in read_corpus(CORPUS) if not e.clean], ids=lambda entry: str(entry.name))
def test_a_wrong_program_is_its_twin_but_for_the_mistake(entry: Entry) -> None:
    twin = read_entry(entry.path.parent / entry.twin)
    assert twin is not None and twin.clean and twin.runs, "it is no clean program that is verified"
    changed = change_of(entry)
    assert changed != entry.runs or entry.runs[0] not in twin.runs, "nothing differs"
    assert len(changed) <= MOST_CHANGED_LINES
