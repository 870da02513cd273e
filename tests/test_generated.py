"""What is generated from the code is up to date, and what is drawn by hand agrees with it."""

import re
from pathlib import Path

import pytest

from allranks import errors
from tools import generate


def test_no_page_is_stale() -> None:
    assert generate.stale_pages() == [], "run `make fix`"


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"[├└]── (\w+) +(\d+)", errors.__doc__ or "")
    classes = errors.AllranksError.__subclasses__()
    assert drawn == [(leaf.__name__, str(leaf.exit_code)) for leaf in classes]
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {"AllranksError", *(leaf.__name__ for leaf in classes)}


def test_each_error_is_one_row_of_the_table() -> None:
    lines = generate.render_errors().splitlines()
    table = lines[lines.index("|---|---|---|") + 1 :]
    assert len(table) == len(errors.AllranksError.__subclasses__())
    assert all(re.fullmatch(r"\| `\w+` \| \d+ \| [^|]+\. \|", row) for row in table)
    assert "| `MemoryShortError` | 1 | Memory ran out in a step. |" in table


def test_a_paragraph_of_several_lines_is_one_cell() -> None:
    class Leaf:
        """Short, and
        broken.

        Attributes:
            none: told.
        """

    assert generate.first_paragraph(Leaf) == "Short, and broken."


def test_a_page_says_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "| `RunError` | 78 |" in generate.render_errors()
    assert "| `train.global_batch` | `32` | samples | a whole number of at least 1 |" in generate.render_config()
    assert "## allranks checkpoint list" in generate.render_commands()
    assert "<code>--device &lt;auto&#124;cpu&#124;cuda&gt;</code>" in generate.render_commands()
    assert "  errors.py            Every error that allranks raises on purpose" in generate.render_tree()
    monkeypatch.setattr(errors.RunError, "exit_code", 79)
    assert "docs/reference/errors.md" in generate.stale_pages()


def test_stale_pages_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "PAGES", {"page.md": lambda: "new\n"})
    for old in (None, "old\n"):
        if old is not None:
            page.write_text(old)
        assert generate.stale_pages() == ["page.md"]
        generate.main()
        assert (page.read_text(), generate.stale_pages()) == ("new\n", [])
