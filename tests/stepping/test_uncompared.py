"""What is known of the cut model where it was not compared with the whole one."""

from types import SimpleNamespace
from typing import cast

import pytest

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.spread import Spread
from allranks.stepping.uncompared import UNCOMPARED, pass_uncompared, refuse_use


def spread_of(**uses: str) -> Spread:
    mesh = SimpleNamespace(layout=Layout(tp=2))
    return cast(Spread, SimpleNamespace(mesh=mesh, stages=None, part_uses=uses))


def test_it_is_said_why_nothing_is_compared() -> None:
    refuse_use(spread_of(), "they differ")
    said = pass_uncompared(spread_of(), "it is too large")
    assert (said.what, said.because) == (UNCOMPARED, "it is too large")


def test_all_lines_that_use_a_part_are_named() -> None:
    spread = spread_of(here="table.weight", there="up.bias")
    with pytest.raises(LayoutError) as caught:
        pass_uncompared(spread, "it is too large")
    said = str(caught.value)
    assert said.startswith("here uses table.weight and there uses up.bias outside of its module, and each rank of tp=2")
    assert 'give table the rule "replicate"' in said and said.endswith(f"; {UNCOMPARED}: it is too large")
    with pytest.raises(LayoutError, match=r"; they differ$"):
        refuse_use(spread, "they differ")
