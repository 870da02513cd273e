"""Running a folder of programs: what is known is not run again, and what is refused is a result."""

from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import ConfigError, MemoryShortError, ProcessError, TaskError
from allranks.request import TrainRequest
from allranks.verifying import scoring
from allranks.verifying.answer import Answer, cannot
from allranks.verifying.corpus import Entry, read_corpus
from allranks.verifying.findings import found
from allranks.verifying.scoring import Record, digest_of, run_all, run_one


class Verify:
    """In verify's place: counts, and says what it is told to."""

    def __init__(self, answer: Answer | Exception) -> None:
        self.answer, self.asked = answer, list[tuple[str | None, int]]()

    def __call__(self, request: TrainRequest, steps: int) -> Answer:
        self.asked.append((request.layout, steps))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def entries(tmp_path: Path) -> list[Entry]:
    (tmp_path / "right.py").write_text('"""Clean: right.\n\nverify: --layout ddp\nverify: --steps 2\n"""\n')
    (tmp_path / "S39_heat.py").write_text('"""S39: heat.\n\ntwin: right.py\nunseen: no oven here\n"""\n')
    return read_corpus(tmp_path)


def test_what_is_known_is_not_run_again(entries: list[Entry], tmp_path: Path) -> None:
    verify, path = Verify(Answer()), tmp_path / "folder" / "record.jsonl"
    first = list(run_all(entries, Record(path), verify))
    assert verify.asked == [("ddp", 4), (None, 2)]
    assert [(result.outcome, known) for result, known in first] == [
        ("unseen", True),
        ("clean", False),
        ("clean", False),
    ]
    with path.open("a") as file:
        file.write('{"digest": "torn')
    again = list(run_all(entries, Record(path), verify))
    assert len(verify.asked) == 2 and [known for _, known in again] == [True, True, True]
    assert [result for result, _ in again] == [result for result, _ in first]


def test_a_digest_is_of_the_program_the_run_and_the_source(
    entries: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entries[1]
    digests = {digest_of(entry, "--layout ddp"), digest_of(entry, "--steps 2")}
    entry.path.write_text(entry.path.read_text() + "x = 2\n")
    digests.add(digest_of(entry, "--layout ddp"))
    monkeypatch.setattr(scoring, "source_digest", lambda: "another")
    digests.add(digest_of(entry, "--layout ddp"))
    assert len(digests) == 4


def test_a_result_is_what_verify_said(entries: list[Entry]) -> None:
    entry = entries[1]
    differs = run_one(entry, "", Verify(Answer((found("S9", "this"), found("S8", "that")))))
    assert (differs.exit_code, differs.kinds) == (1, ("S9", "S8")) and differs.said.startswith("this (S9")
    unknown = run_one(entry, "", Verify(cannot("it draws", "randn", "do not")))
    assert (unknown.exit_code, unknown.kinds, unknown.said) == (3, (), "it draws; randn")
    for broken in (ProcessError("a peer is lost"), MemoryShortError("a step is too large")):
        assert run_one(entry, "", Verify(broken)).outcome == "not verified"
    refused = run_one(entry, "", Verify(TaskError("no model " * 100)))
    assert refused.outcome == "false alarm" and refused.said.endswith("...") and len(refused.said) == 240


def test_only_a_refusal_for_its_mistake_is_a_catch(entries: list[Entry]) -> None:
    wrong = replace(entries[1], kind="S9", refused="returns a mean")
    rightly = run_one(wrong, "", Verify(TaskError(f"{'Task.' * 60}loss returns a mean over targets")))
    assert rightly.outcome == "refused" and rightly.right and "returns a mean" not in rightly.said
    for entry in (wrong, replace(wrong, refused="")):
        otherwise = run_one(entry, "", Verify(ConfigError("no key train.sedd: did you mean train.seed?")))
        assert otherwise.outcome == "not verified" and not otherwise.right
    assert run_one(wrong, "", Verify(ProcessError("it returns a mean"))).outcome == "not verified"
    assert run_one(wrong, "", Verify(Answer((found("S9", "this"),)))).outcome == "caught"


def test_a_record_of_other_bytes_has_no_results(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(bytes(range(256)))
    assert Record(tmp_path / "record").get("x") is None


def test_a_record_that_cannot_be_written_is_told(entries: list[Entry], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another file"):
        list(run_all(entries, Record(tmp_path / "file" / "record"), Verify(Answer())))
