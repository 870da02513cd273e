"""docs/how-to/rehearse.md: its commands run, and answer."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from tests.commands import POINTS
from tests.test_documentation import blocks

PAGE = "docs/how-to/rehearse.md"
COMMANDS = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
CHEAP = ("task.py", "plans/first/RUN.toml")
QWEN: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
"""https://huggingface.co/Qwen/Qwen3-8B"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page takes to be there: a Task, and somebody else's model."""
    shutil.copy(POINTS, tmp_path / "task.py")
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text(json.dumps(QWEN))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_rehearses_a_name_a_task_a_plan_and_a_file() -> None:
    asked = [shlex.split(command)[2] for command in COMMANDS]
    assert asked == ["llama3-70b", *CHEAP, "qwen3-8b/config.json", "llama3-8b"]
    assert all(command.startswith("allranks dryrun ") for command in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=() if shlex.split(one)[2] in CHEAP else pytest.mark.full) for one in COMMANDS],
)
def test_every_command_answers(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "plans/first" in command:
        assert main(["plan", "task.py", "--cluster", "1x2:cpu", "--save", "plans/first"]) == 0
        capsys.readouterr()
    assert main(shlex.split(command)[1:]) == 0, "it fits, and no rank would hang"
    told = capsys.readouterr().out
    assert re.search(r"^fits: [\d.]+ [kMG]B of [\d.]+ GB at the peak", told, re.MULTILINE), told
    assert ("host" in told) == ("offload" in command)
