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
    assert Recording(events=[(1, 10), (2, 5), (1, -10), (3, 9), (2, -5)]).peak_bytes() == 15
    assert Recording().peak_bytes() == 0
