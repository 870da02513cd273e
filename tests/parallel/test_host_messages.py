"""What lies on a device that gloo sends nothing of goes through the host; the processor's own stands for it here."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.launching.environment import ALONE
from allranks.parallel.backend import DeviceChoice, start, stop
from allranks.parallel.host_messages import carry_messages
from allranks.parallel.stage_schedule import CLASSES
from tests.distributed.pool import Pools
from tests.parallel import test_ring, test_stage_schedule

pytestmark = pytest.mark.distributed


KIND: Any = dist.ProcessGroup


@contextmanager
def watched() -> Iterator[list[int]]:
    """Inside: the addresses of what gloo itself is given to send, or to receive into."""
    found: list[int] = []
    own = {name: vars(KIND)[name] for name in ("send", "recv")}

    def noting(call: Any) -> Any:
        def note(group: Any, tensors: Any, *rest: Any) -> Any:
            found.extend(tensor.data_ptr() for tensor in tensors)
            return call(group, tensors, *rest)

        return note

    for name in own:
        setattr(KIND, name, noting(getattr(KIND, name)))
    try:
        yield found
    finally:
        for name, method in own.items():
            setattr(KIND, name, method)


def carried(function: Any, *arguments: Any, device_type: str = "cpu") -> tuple[Any, list[int]]:
    """In a worker: what `function` finds, and the addresses that gloo has seen."""
    with watched() as seen:
        end = carry_messages(device_type)
        try:
            found = function(*arguments)
        finally:
            end()
    return found, seen


def exchange() -> tuple[list[float], list[int]]:
    """What the other one sent, in each way there is; the addresses of these tensors."""
    other = 1 - dist.get_rank()
    out = [torch.full((3,), 10.0 * dist.get_rank() + way) for way in range(4)]
    into = [torch.zeros(3, requires_grad=True) for _ in out]  # as torch 2.11's stages have them
    if other:
        dist.send(out[0], other)
        dist.recv(into[0], other)
    else:
        dist.recv(into[0], other)
        dist.send(out[0], other)
    works: list[Any] = [dist.irecv(into[1], other), dist.isend(out[1], other)]
    moves = [(dist.isend, one) for one in out[2:]] + [(dist.irecv, one) for one in into[2:]]
    works += dist.batch_isend_irecv([dist.P2POp(move, one, other) for move, one in moves])
    assert all(work.wait() and work.is_completed() for work in works)
    assert all(bool((one == one[0]).all()) for one in into)
    return [one[0].item() for one in into], [one.data_ptr() for one in (*out, *into)]


def exchange_by(device_type: str) -> tuple[list[float], int, int]:
    """In a worker: what came, how many tensors gloo has seen, and how many of those that we hold."""
    (came, held), seen = carried(exchange, device_type=device_type)
    assert exchange()[0] == came  # and it is torch's own again
    return came, len(seen), len(set(held).intersection(seen))


@pytest.mark.parametrize(("device_type", "held"), [("cpu", 0), ("cuda", 8)])
def test_gloo_is_given_copies_of_that_kind_of_device_alone(pool: Pools, device_type: str, held: int) -> None:
    first, second = pool(2).run(exchange_by, device_type)
    assert first == ([10.0, 11.0, 12.0, 13.0], 8, held)
    assert second == ([0.0, 1.0, 2.0, 3.0], 8, held)


@pytest.mark.parametrize("schedule", sorted(CLASSES))
def test_a_pipeline_computes_the_same(pool: Pools, schedule: str) -> None:
    arguments = (schedule, [2] * test_stage_schedule.NUMBER)
    plain = pool(2).run(test_stage_schedule.run, *arguments)
    for (found, seen), expected in zip(pool(2).run(carried, test_stage_schedule.run, *arguments), plain, strict=True):
        assert len(seen) > 2 * test_stage_schedule.NUMBER
        assert found[1:] == expected[1:]
        assert all(torch.equal(found[0][name], gradient) for name, gradient in expected[0].items())


def test_a_ring_computes_the_same(pool: Pools) -> None:
    arguments = (16, (2,), 2, True, torch.float32)
    plain = pool(2).run(test_ring.attend, *arguments)
    ranks = pool(2).run(carried, test_ring.attend, *arguments)
    assert [found for found, _ in ranks] == plain
    assert all(seen for _, seen in ranks)


def test_it_begins_and_ends_with_processes_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gloo serves a GPU, and nowhere else."""
    own = KIND.send
    for name in ("keep_memory", "take_device"):
        monkeypatch.setattr(f"allranks.parallel.backend.{name}", lambda device: None)
    for device, changed in (("cuda", True), ("cpu", False)):
        choice = DeviceChoice(torch.device(device), "gloo", None, ())
        with monkeypatch.context() as inside:
            inside.setattr(dist, "init_process_group", lambda *given, **named: None)
            inside.setattr("allranks.parallel.backend.open_store", lambda *given, **named: None)
            inside.setattr("allranks.parallel.backend.check_reachable", lambda *given, **named: None)
            start(replace(ALONE, world_size=2), choice, timeout_seconds=5)
        assert (KIND.send is not own) is changed
        stop()
        assert KIND.send is own
