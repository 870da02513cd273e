"""docs/how-to/simulate.md: its commands run, and its file of failures is one."""

import shlex
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.rehearsing.failure_rates import read_failures
from tests.test_documentation import blocks

PAGE = "docs/how-to/simulate.md"


@pytest.mark.parametrize("command", [block.strip() for block in blocks(PAGE, "bash")])
def test_every_command_answers(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(command)[1:], "--runs", "8"]) == 0
    assert "Goodput " in capsys.readouterr().out


def test_the_file_of_failures_is_one(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(blocks(PAGE, "toml")[0])

    assert [part.name for part in read_failures(path).components] == ["GPU", "switch", "storage", "flapping link"]
