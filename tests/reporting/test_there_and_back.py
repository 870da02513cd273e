"""Orders of pipelines that go there and back: every half of every micro-step once, none before what it follows."""

from collections.abc import Callable

import pytest

from allranks.reporting.there_and_back import Visit, order_dualpipev, order_zbv

ORDERS = (order_zbv, order_dualpipev)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("pp", "num_micro_steps"), [(2, 4), (3, 6), (4, 12), (5, 10)])
def test_every_half_once_and_in_turn(
    order: Callable[[int, int, int], list[Visit]], pp: int, num_micro_steps: int
) -> None:
    for rank in range(pp):
        visits = order(rank, pp, num_micro_steps)
        places = {visit: place for place, visit in enumerate(visits)}
        assert len(places) == len(visits) == 6 * num_micro_steps
        for turn in (0, 1):
            for number in range(num_micro_steps):
                forward, backward, weight = (places[kind, turn, number] for kind in ("forward", "backward", "weight"))
                assert forward < backward < weight
            assert places["forward", 0, 0] < places["forward", 1, 0]


def test_zbv_keeps_no_more_than_1f1b() -> None:
    """pp whole ranks' activations, 2 * pp of its half stages (2405.15362, table 1)."""
    for rank in range(4):
        under_way = most = 0
        for kind, _, _ in order_zbv(rank, 4, 16):
            under_way += {"forward": 1, "backward": 0, "weight": -1}[kind]
            most = max(most, under_way)
        assert most == 2 * 4


def test_dualpipev_leaves_the_weights_of_the_last_backwards_for_the_end() -> None:
    kinds = [kind for kind, _, _ in order_dualpipev(3, 4, 16)]
    assert kinds[-2:] == ["weight", "weight"]
    assert "forward" not in kinds[-16:]
