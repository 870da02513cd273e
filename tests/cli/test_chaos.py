import json
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from allranks.fault_points import Fault
from allranks.surviving import chaos
from allranks.surviving.chaos import Answer, Trial
from allranks.surviving.incidents import Incident
from allranks.surviving.invariants import Invariant
from allranks.verdict import Decision

INCIDENT = Incident(Fault(0, "forward", 1, 8, 1, "kill"), "restarted", ("rank 1 was killed",), 5, 2, 0.5)
ANSWER = Answer(
    Path("trial"),
    1,
    "broken: I2 of I1 to I7 did not hold",
    (Invariant("I1", True, "all equal"), Invariant("I2", False, "a ledger differs"), Invariant("I3", None, "unknown")),
    (INCIDENT,),
    planned=1,
    restarts=1,
    decisions=(Decision("checkpoint.every=5", "none is named"),),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    trials: list[Trial] = []

    def answer(trial: Trial, say: Any) -> Answer:
        trials.append(trial)
        say("training undisturbed")
        return ANSWER

    monkeypatch.setattr(chaos, "break_on_purpose", answer)
    return trials


def test_what_is_asked(asked: list[Trial]) -> None:
    words = "chaos task.py train.steps=9 --kills 4 --seed 2 --layout ddp --nproc 3 --points forward:stop --run there"
    assert main(words.split()) == 1
    options = ("--layout", "ddp", "--nproc", "3")
    assert asked == [Trial(("task.py", "train.steps=9"), options, 4, 2, "forward:stop", Path("there"))]


def test_defaults(asked: list[Trial]) -> None:
    assert main(["chaos"]) == 1
    (trial,) = asked
    assert (trial.arguments, trial.options, trial.kills, trial.seed, trial.points) == ((), (), 10, 0, None)
    assert trial.folder.parent == Path("runs") and "-chaos-" in trial.folder.name


def test_the_verdict_comes_first(asked: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    main(["chaos"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == ANSWER.what and err == "training undisturbed\n"
    assert lines[1:4] == ["  I1 holds: all equal", "  I2 DOES NOT HOLD: a ledger differs", "  I3 undetermined: unknown"]
    assert lines[5].split() == ["0", "forward", "kill", "1", "8", "restarted", "5", "2", "0.50"]
    assert lines[-2] == "- checkpoint.every=5, because none is named" and lines[-1].endswith("lie in trial")


def test_json_is_one_document(asked: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["planned"], document["happened"], document["recovered"]) == (1, 1, 1)
    assert document["incidents"][0]["point"] == "forward" and document["invariants"][1]["holds"] is False


def test_an_argument_of_no_form_is_refused_first(asked: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "what"]) == 2
    assert "is neither a task nor a config nor a key" in capsys.readouterr().err and asked == []
