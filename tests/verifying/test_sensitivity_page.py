"""What the page on verify says of its sensitivity is what the tests demand."""

import re
from pathlib import Path

from tests.verifying.test_sensitivity import NOT_FOUND, TENSORS


def test_the_page_says_what_is_demanded() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "verify.md").read_text()
    assert f"at least {TENSORS - NOT_FOUND} of the {TENSORS} of the transformer" in page
    rows_of_page = re.findall(r"\| transformer \|.*\| (\d+) of (\d+) \|", page)
    least = [int(found) for found, of in rows_of_page if of == str(TENSORS)]
    assert len(least) == 6 and min(least) >= TENSORS - NOT_FOUND
