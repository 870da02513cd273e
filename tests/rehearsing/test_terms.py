"""What all ranks have to say alike of a collective is read off torch's own calls."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.parallel.seen_collectives import Collectives
from allranks.parallel.tensor_ops import all_gather_single, reduce_scatter_single
from allranks.rehearsing.terms import even_bytes, terms_of, waits_of
from allranks.rehearsing.world import fake_world

NUMBERS = torch.zeros(4)
CASES: list[tuple[Callable[[], Any], str, int | None]] = [
    (lambda: dist.all_reduce(NUMBERS.clone()), "float32", 16),
    (lambda: dist.broadcast(NUMBERS.clone(), src=1), "float32 from member 1 of its group", 16),
    (lambda: dist.reduce(NUMBERS.clone(), dst=1), "float32 to member 1 of its group", 16),
    (lambda: dist.all_gather([NUMBERS.clone(), NUMBERS.clone()], NUMBERS), "float32", 32),
    (lambda: all_gather_single(torch.zeros(8), NUMBERS), "float32", 32),
    (lambda: reduce_scatter_single(torch.zeros(2), NUMBERS.clone()), "float32", 16),
    (lambda: dist.all_to_all_single(NUMBERS.clone(), NUMBERS), "float32", 16),
    (lambda: dist.all_to_all_single(NUMBERS.clone(), NUMBERS, [1, 3], [2, 2]), "float32", None),
    (lambda: dist.scatter(NUMBERS.clone(), [NUMBERS, NUMBERS], src=0), "float32 from member 0 of its group", 16),
    (lambda: dist.gather(NUMBERS, [NUMBERS.clone(), NUMBERS.clone()], dst=0), "float32 to member 0 of its group", 16),
]


@pytest.mark.parametrize(("call", "terms", "num_bytes"), CASES)
def test_terms_of_a_call(call: Callable[[], Any], terms: str, num_bytes: int | None) -> None:
    seen: list[tuple[str, int | None]] = []

    def note(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        seen.append((terms_of(name, args), even_bytes(name, args)))

    with fake_world(0, 2, "gloo"), Collectives(note):
        call()
    assert seen == [(terms, num_bytes)]


def test_what_is_asked_for_without_waiting_does_not_wait() -> None:
    seen: list[bool] = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d::" in func._schema.name:
                seen.append(waits_of(func, args))
            return func(*args, **(kwargs or {}))

    with fake_world(0, 2, "gloo"), Dispatched():  # type: ignore[no-untyped-call]
        dist.all_reduce(NUMBERS.clone())
        dist.barrier()
        dist.all_reduce(NUMBERS.clone(), async_op=True)
        dist.barrier(async_op=True)
        dist.send(NUMBERS, 1)
    assert seen == [True, True, False, False, False]
