"""Pages of which one part is generated: what stands between two markers."""

from pathlib import Path


def replace_marked(page: Path, begin: str, end: str, middle: str) -> str:
    """The text of `page` with what stands between the two marker lines replaced. AssertionError: they are not there."""
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    assert found and closed, f"{page.name} has lost its markers"
    return f"{before}{begin}{middle}{end}{after}"
