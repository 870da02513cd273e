"""The error tree: its docstring is the truth about classes and exit codes."""

import re

import pytest

from allranks import errors
from allranks.errors import AllranksError, worker_exit_code

LEAVES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AllranksError)][1:]


def test_docstring_draws_every_class_with_its_exit_code() -> None:
    drawn = dict(re.findall(r"── (\w+) +(\d+) ", errors.__doc__ or ""))
    assert drawn == {leaf.__name__: str(leaf.exit_code) for leaf in LEAVES}


def test_every_class_is_a_direct_leaf_of_the_tree() -> None:
    assert all(leaf.__bases__ == (AllranksError,) for leaf in LEAVES)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_a_worker_never_exits_with_the_code_for_refused_before_a_worker_starts(leaf: type[AllranksError]) -> None:
    expected = {2: 78, 78: 78, 76: 76, 1: 1, 93: 93}[leaf.exit_code]
    assert worker_exit_code(leaf("what is wrong")) == expected
