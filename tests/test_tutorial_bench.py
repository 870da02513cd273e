"""bench/tutorial.py: a command that fails does not count as a fast one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment

PROGRAM = Path(__file__).parents[1] / "bench" / "tutorial.py"
COMMANDS = {
    "answers_yes": "print('fits')",
    "answers_no": "print('does not fit'); raise SystemExit(1)",
    "refuses": "raise SystemExit(2)",
    "crashes": "raise ValueError('of a bug')",
    "crashes_late": "print('fits'); raise ValueError('of a late bug')",
    "is_killed": "import os; os.kill(os.getpid(), 9)",
}


def measure(folder: Path, *names: str) -> tuple[int, dict[str, str]]:
    """(Exit code, why each of these commands counts as failed)."""
    for name in names:
        (folder / f"{name}.py").write_text(COMMANDS[name])
    page = folder / "page.md"
    page.write_text("".join(f"```bash\n{name} --fast\n```\n\n" for name in names))
    command = [sys.executable, str(PROGRAM), "--json", "--page", str(page)]
    known = environment() | {"PYTHONPATH": str(folder)}
    found = subprocess.run(command, env=known, capture_output=True, text=True, timeout=200, check=False)
    rows = json.loads(found.stdout)["commands"]
    return found.returncode, {row["command"]: row["failed"] for row in rows}


def test_commands_that_answer_are_measured(tmp_path: Path) -> None:
    assert measure(tmp_path, "answers_yes", "answers_no") == (0, {"answers_yes --fast": "", "answers_no --fast": ""})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("refuses", "exit code 2: nothing was said"),
        ("crashes", "exit code 1: ValueError: of a bug"),
        ("crashes_late", "exit code 1: ValueError: of a late bug"),
        ("is_killed", "exit code -9: nothing was said"),
    ],
)
def test_one_that_fails_is_told_and_fails_the_measurement(tmp_path: Path, name: str, why: str) -> None:
    assert measure(tmp_path, "answers_yes", name) == (1, {"answers_yes --fast": "", f"{name} --fast": why})
