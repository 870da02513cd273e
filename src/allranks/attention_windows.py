"""Attention in windows: what a query sees of the keys where some layers of a model attend to the last few positions."""

from collections.abc import Sequence


def keys_seen(seq: int, windows: Sequence[int], causal: bool) -> tuple[float, float]:
    """(Keys that a query may see, of them the share that a fused kernel computes), means over the layers.

    Args:
        seq: positions, of queries as of keys.
        windows: of each layer, in positions, a query's own among them; 0: it sees all.
        causal: a query sees no later positions.

    Arithmetic: of seq * w pairs of a query and a key in its window of w causal ones lack w * w / 2, as full attention
    lacks half of seq * seq (FlashAttention-2 2307.08691, section 3.1, skips what is masked as a whole).
    """
    widths = [min(window or seq, seq) for window in windows]
    pairs = sum(width * (1 - width / (2 * seq)) if causal else float(width) for width in widths)
    return sum(widths) / len(widths), pairs / sum(widths)


def say_windows(turn: Sequence[int], layers: int) -> str:
    """`22 of 26 layers attend to windows of 512 positions`; `turn` as in ModelShape, of one width."""
    number = sum(turn[layer % len(turn)] > 0 for layer in range(layers))
    whose = f"all {layers} layers" if number == layers else f"{number} of {layers} layers"
    return f"{whose} attend to windows of {max(turn)} positions"
