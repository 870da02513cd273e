"""What a recording sums up."""

from allranks.profiling.recording import Call, Recording


def call(saved_bytes: int = 0, flops: float = 0.0, *, backward: bool = False) -> Call:
    return Call(
        op="mm",
        modules=("",),
        backward=backward,
        kind="matmul",
        flops=flops,
        shape=(),
        inputs=(),
        moved_bytes=0,
        output_bytes=0,
        parameters=(),
        from_parameters=False,
        saved_bytes=saved_bytes,
    )


def test_sums() -> None:
    found = Recording([call(8, 3.0), call(4, 2.0), call(1, 7.0, backward=True)])
    assert found.saved_bytes == 13
    assert found.backward_flops() == 7.0


def test_the_peak_is_the_most_that_is_alive_at_once() -> None:
    assert Recording(events=[(1, 10, 0), (2, 5, 1), (1, -10, 1), (3, 9, 2), (2, -5, 2)]).peak_bytes() == 15
    assert Recording().peak_bytes() == 0


def test_a_loss_holds_what_lives_beside_what_the_model_kept() -> None:
    """Of the model's output (10) 8 are kept; the loss makes 4 and its gradient 6, and reads 2 that were given."""
    calls = [call(8), call(6), call(backward=True), call(backward=True)]
    calls[1].given_bytes, calls[3].parameters = 2, ("weight",)
    events = [(1, 10, 0), (2, 4, 1), (3, 6, 2), (4, 100, 3)]
    assert Recording(calls, events=events).loss_bytes([1]) == (10 + 4 + 6) - 8 + 2
    gone = [*events[:1], (1, -10, 0), *events[1:]]  # what was kept is another's, or was there before
    assert Recording(calls, events=gone).loss_bytes([1]) == 4 + 6 + 2
    assert Recording(calls, events=[]).loss_bytes([1]) == 6  # never less than what it keeps itself
