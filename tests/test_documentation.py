"""What the documentation shows exists: Python compiles (the README's runs), commands, options and keys are real."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from allranks.cli.main import app
from allranks.config_keys import config_keys

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def command_problems(line: str) -> Iterator[str]:
    """What is wrong with one line of a shell block."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        yield from (f"make {word}: no such target" for word in words[1:] if "=" not in word and word not in TARGETS)
    elif program == "allranks":
        yield from allranks_problems(words[1:])
    elif program == "torchrun":
        if "allranks" in words:
            yield from allranks_problems(words[words.index("allranks") + 1 :])
    else:
        yield f"{words[0]}: this test knows no such program"


def allranks_problems(words: list[str]) -> Iterator[str]:
    """What is wrong with the arguments of `allranks`."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands"):
        yield f"allranks {' '.join(words)}: no such command"
        return
    options = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        key, is_setting, _ = word.partition("=")
        if word.startswith("--") and key not in options:
            yield f"allranks {command.name}: no option {key}"
        elif (
            is_setting
            and re.fullmatch(r"[a-z_]+\.\w+", key)
            and key not in config_keys()
            and not key.startswith("task.")
        ):
            yield f"no config key {key}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert [problem for line in lines for problem in command_problems(line)] == []


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles(page: str) -> None:
    for block in blocks(page, "python"):
        compile(block, page, "exec")


def test_the_python_of_the_readme_runs() -> None:
    for block in blocks("README.md", "python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_first_screen_shows_demo_and_test() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make demo" in screen
    assert "make test" in screen


def test_a_wrong_command_is_seen() -> None:
    wrong = {
        "make dance": "make dance: no such target",
        "allranks fly": "allranks fly: no such command",
        "allranks checkpoint": "allranks : no such command",
        "allranks train --speed 3": "allranks train: no option --speed",
        "torchrun --nnodes=2 -m allranks train optimizer.rate=1": "no config key optimizer.rate",
        "curl example.org": "curl: this test knows no such program",
    }
    for line, problem in wrong.items():
        assert list(command_problems(line)) == [problem]
    assert list(command_problems("make test-full PART=1/4  # a quarter")) == []
    assert list(command_problems(".venv/bin/allranks train task.py train.steps=3 task.width=4 --nproc 2")) == []


def anchors(text: str) -> set[str]:
    """What a link into a page may name: its headings, as mkdocs writes them."""
    found: set[str] = set()
    for heading in re.findall(
        r"^#{1,6} (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.M
    ):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"\]\(.*?\)", "", heading)).strip().lower()
        slug = name = re.sub(r"[-\s]+", "-", plain)
        number = 0
        while name in found:
            number += 1
            name = f"{slug}_{number}"
        found.add(name)
    return found


def dead_anchors(page: str, text: str) -> Iterator[str]:
    """Links of a page to headings that are not there."""
    for path, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", text):
        target = (ROOT / page).parent / path if path else None
        if anchor not in anchors(text if target is None else target.read_text()):
            yield f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_links_into_pages_lead_to_a_heading(page: str) -> None:
    assert list(dead_anchors(page, (ROOT / page).read_text())) == []


def test_a_dead_anchor_is_seen() -> None:
    text = "## `tp` and what it costs\n```\n# a comment\n```\n## Twice\n## Twice\n"
    links = "[a](#tp-and-what-it-costs) [b](#twice_1) [c](docs/explanation/measured.md#measured) "
    assert list(dead_anchors("README.md", text + links)) == []
    dead = "[d](#a-comment) [e](docs/explanation/measured.md#verify-of-the-examples)"
    assert list(dead_anchors("README.md", text + dead)) == [
        "#a-comment",
        "docs/explanation/measured.md#verify-of-the-examples",
    ]


def test_the_docs_build_hears_its_warnings() -> None:
    builds = [line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line]
    assert builds and all("--strict" in line for line in builds)
    # mkdocs counts the warnings that it logs: under --quiet there are none, and --strict ends with 0.
    assert not any("--quiet" in line or " -q" in line for line in builds)


def test_every_picture_is_there_and_used() -> None:
    text = "".join((ROOT / page).read_text() for page in PAGES)
    assert {path.name for path in (ROOT / "docs" / "assets").glob("*.svg")} == set(
        re.findall(r"assets/([\w-]+\.svg)", text)
    )
