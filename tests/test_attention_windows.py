"""Attention in windows, against pairs of queries and keys that are counted one by one."""

import pytest

from allranks.attention_windows import keys_seen, say_windows

SEQ = 64


@pytest.mark.parametrize("windows", [(8,), (0,), (64,), (100,), (8, 8, 8, 0), (1, 0)])
def test_the_pairs_are_those_that_one_counts(windows: tuple[int, ...]) -> None:
    def see(window: int, query: int, key: int) -> bool:
        return key <= query and (not window or key > query - window)

    counted = [sum(see(window, q, k) for q in range(SEQ) for k in range(SEQ)) for window in windows]
    keys, share = keys_seen(SEQ, windows, causal=True)
    assert keys == sum(min(window or SEQ, SEQ) for window in windows) / len(windows)
    # The diagonal is half masked for a formula, and not at all for who counts.
    diagonal = sum(min(window or SEQ, SEQ) for window in windows) / 2 / len(windows)
    assert SEQ * keys * share + diagonal == pytest.approx(sum(counted) / len(windows), abs=diagonal)
    assert SEQ * keys * share == pytest.approx(sum(counted) / len(windows), rel=0.1)


def test_full_attention_is_a_window_of_all_positions() -> None:
    assert keys_seen(SEQ, (0,), causal=True) == keys_seen(SEQ, (SEQ, 2 * SEQ), causal=True) == (SEQ, 0.5)
    assert keys_seen(SEQ, (8, 0), causal=False) == (36, 1.0)


def test_how_many_layers_have_a_window_is_said() -> None:
    assert say_windows((512,) * 5 + (0,), 26) == "22 of 26 layers attend to windows of 512 positions"
    assert say_windows((4096,), 32) == "all 32 layers attend to windows of 4096 positions"
