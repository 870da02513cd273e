"""Which attempt was the last to go on: noted durably, never by one that is over, never for another run."""

from pathlib import Path

import pytest

from allranks.checkpointing.going_on import has_noted, last_to_go_on, note_going_on
from allranks.config import Config
from allranks.errors import CheckpointError, RunError
from allranks.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Whose first attempt has begun."""
    made = Run.create(tmp_path, "task", Config(), {}, directory=tmp_path / "run")
    made.begin_attempt()
    return made


def test_an_attempt_counts_when_it_goes_on(run: Run) -> None:
    assert last_to_go_on(run) is None and not has_noted(run)
    note_going_on(run)
    run.begin_attempt()
    assert has_noted(run) and last_to_go_on(run) == 1 and last_to_go_on(Run.open(run.path)) == 1
    note_going_on(run)
    assert last_to_go_on(run) == 2 and list(run.path.glob(".*")) == []


def test_where_none_has_noted_it_only_who_keeps_copies_does(run: Run) -> None:
    note_going_on(run, first=False)
    assert last_to_go_on(run) is None and not (run.path / "went_on.json").exists()
    note_going_on(run)
    run.begin_attempt()
    note_going_on(run, first=False)
    assert last_to_go_on(run) == 2


def test_one_that_was_frozen_while_another_took_over_notes_nothing(run: Run) -> None:
    note_going_on(run)
    newer = Run.open(run.path)
    newer.begin_attempt()
    with pytest.raises(CheckpointError, match="a later one has taken over"):
        note_going_on(run)
    note_going_on(newer)
    with pytest.raises(CheckpointError, match="a later one has taken over"):
        note_going_on(run)
    assert last_to_go_on(run) == 2 and list(run.path.glob(".*")) == []


@pytest.mark.parametrize("text", ["{torn", "[1]", '{"run": 3}', '{"run": "ID", "attempt": "1"}', '{"attempt": 1}'])
def test_what_cannot_be_read_says_nothing(run: Run, text: str) -> None:
    (run.path / "went_on.json").write_text(text.replace("ID", run.id))
    assert last_to_go_on(run) is None and has_noted(run), "as all hosts see it"


def test_another_run_in_its_place_has_not_gone_on(run: Run) -> None:
    note_going_on(run)
    run.replace_identity("another", {})
    assert last_to_go_on(run) is None


def test_a_directory_that_refuses_is_named(run: Run) -> None:
    (run.path / "went_on.json").mkdir()
    with pytest.raises(RunError, match=r"run cannot be written: .*irectory"):
        note_going_on(run)
