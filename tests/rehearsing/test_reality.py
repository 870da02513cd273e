"""What a real step is measured by; the comparison itself is in tests/distributed/test_rehearsal_laws.py."""

from allranks.rehearsing.reality import measure_step
from tests.distributed.sessions import config_of, session_of
from tests.rehearsing.tasks import Layered


def test_a_step_alone() -> None:
    task = Layered(width=64)
    session = session_of(task, config_of("single", "train.global_batch=8", precision="float32", steps=8))
    measured = measure_step(session)
    parameters = sum(p.numel() for p in task.model().parameters())
    state, batch = 12 * parameters, 8 * (4 * 64 + 8)
    assert state + batch <= measured.resting_bytes <= state + batch + 64
    assert measured.peak_bytes >= measured.resting_bytes + 4 * parameters
    assert measured.collectives == {}
