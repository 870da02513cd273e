"""Every example is equal to one device under `allranks verify`, in one dimension and in two, as its user would ask."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.commands import EXAMPLES

PROGRAM = Path(__file__).parents[2] / "bench" / "verify_examples.py"
NOTHING_TO_CUT = "tp finds nothing to cut"
REFUSED = {(name, "tp=2,dp_shard=2"): NOTHING_TO_CUT for name in ("fine_tuning", "vision", "migrate/hf_trainer")}
"""What an example does not allow, and what verify says of it."""


def program() -> Any:
    spec = importlib.util.spec_from_file_location("verify_examples", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = [*program().TASKS, *program().LOOPS]


def verified(*words: str) -> list[dict[str, Any]]:
    """The rows that the program prints."""
    ran = subprocess.run(
        [sys.executable, PROGRAM, *words, "--json"], capture_output=True, text=True, check=False, timeout=1700
    )
    assert ran.returncode == 0, ran.stderr
    rows: list[dict[str, Any]] = json.loads(ran.stdout)["rows"]
    return rows


def wrong(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are neither equal nor refused for the reason that is known."""
    found = []
    for row in rows:
        reason = next((why for (name, run), why in REFUSED.items() if name == row["example"] and run in row["run"]), "")
        if row["exit_code"] != (2 if reason else 0) or reason not in row["said"]:
            found.append(row)
    return found


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_equal_to_one_device(name: str) -> None:
    rows = verified("--examples", name)
    assert len(rows) == (2 if name in program().LOOPS else 3) and wrong(rows) == []
    assert all(row["seconds"] > 0 < row["processor_seconds"] for row in rows)


def test_every_example_is_verified_or_said_why_not() -> None:
    folders = {str(path.parent.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")}
    assert folders == {*NAMES, *program().SCRIPTS}
    layouts = [words[1:3] for name, words, _ in program().cases(["gan"], [0, 1, 2])]
    assert layouts == [["--layout", "ddp"], ["--layout", "dp_replicate=2,dp_shard=2"], ["--layout", "tp=2,dp_shard=2"]]
    assert [limit for _, _, limit in program().cases(["gan", "own_loop"], [0, 1, 2])] == [30, 60, 60, 30, 60]


def test_another_answer_is_not_taken_for_a_refusal() -> None:
    def row(name: str, run: str, exit_code: int, said: str) -> dict[str, Any]:
        return {"example": name, "run": f"--layout {run}", "exit_code": exit_code, "said": said}

    good = [row("gan", "ddp", 0, "equal"), row("fine_tuning", "tp=2,dp_shard=2", 2, f"error: {NOTHING_TO_CUT}: no")]
    bad = [
        row("gan", "ddp", 1, "gradients"),
        row("gan", "tp=2,dp_shard=2", 2, NOTHING_TO_CUT),
        row("fine_tuning", "tp=2,dp_shard=2", 2, "another reason"),
        row("fine_tuning", "tp=2,dp_shard=2", 0, "equal"),
    ]
    assert wrong([*good, *bad]) == bad
