"""Pages of which one part is generated: what stands between two markers."""

from pathlib import Path


def replace_marked(page: Path, begin: str, end: str, middle: str) -> str:
    """The text of `page` with what stands between the two marker lines replaced. AssertionError: they are not there."""
    return replace_between(page.read_text(), begin, end, middle, page.name)


def replace_between(text: str, begin: str, end: str, middle: str, name: str) -> str:
    """The same of a page's text; `name` is what the page is called."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    assert found and closed, f"{name} has lost its markers"
    return f"{before}{begin}{middle}{end}{after}"
