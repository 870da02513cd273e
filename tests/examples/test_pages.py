"""The commands on the pages do what the pages say: every ```sh block is run, in order, in one folder per page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    *("tutorial/first-run.md", "tutorial/your-own-model.md"),
    *("how-to/own-loop.md", "how-to/slow-links.md", "how-to/precision-and-ema.md"),
    "explanation/questions.md",
)
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


LISTINGS = {
    "tutorial/your-own-model.md": "digits/task.py",
    "reference/task.md": "digits/task.py",
    "how-to/own-loop.md": "own_loop/train.py",
}


@pytest.mark.parametrize(("page", "file"), LISTINGS.items())
def test_a_listing_is_the_file(page: str, file: str) -> None:
    assert f"```python\n{(ROOT / 'examples' / file).read_text()}```" in (ROOT / "docs" / page).read_text()


def command(kind: str, text: str) -> list[str] | None:
    """How to run a block; None for a listing."""
    if any(text == (ROOT / "examples" / file).read_text() for file in LISTINGS.values()):
        return None
    return ["bash", "-euc", text] if kind == "sh" else [sys.executable, "-c", text]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(900)  # a page has up to ten commands that train
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text())
    assert blocks, f"{page} has no command"
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for kind, text in blocks:
        if (arguments := command(kind, text)) is None:
            continue
        ran = subprocess.run(
            arguments, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
