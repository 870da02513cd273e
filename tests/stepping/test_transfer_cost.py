"""What the start says of transfers is what the steps then make."""

import re
from collections import Counter
from typing import Any

import pytest

from allranks.data.cut import Cut
from allranks.stepping.transfer_cost import TransferCost, describe_transfers
from allranks.units import format_bytes
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import MODELS, Tiny


@pytest.mark.parametrize("kind", MODELS)
def test_the_start_tells_what_a_step_moves(kind: str) -> None:
    config = config_of("placement", "train.global_batch=12", "train.micro_steps=3")
    session = session_of(Tiny(kind=kind), config)
    assert session.spread.placement is not None
    with session.spread.placement.recorded() as found:
        list(step_through(session, 1))
    ways: Counter[tuple[str, str]] = Counter()
    for one in found:
        ways[one.source, one.target] += one.num_bytes
    (said,) = [str(d) for d in session.decisions if d.what.startswith("a step moves")]
    assert f"a step moves {len(found)} tensors between devices, {format_bytes(sum(ways.values()))} (" in said
    assert all(f"{source} to {target} {format_bytes(size)}" in said for (source, target), size in ways.items())
    back = sum(one.backward for one in found) // 3
    assert f"{len(found) // 3 - back} go forward and {back} back in each of 3 micro-steps" in said
    assert all(parameter.grad is None for parameter in session.spread.trainable().values())


def test_tables_count_once_a_micro_step_and_samples_by_their_number() -> None:
    cost = TransferCost(
        2, 1, {("cpu:0", "cpu:1"): 10.0, ("cpu:1", "cpu:0"): 0.0}, {("cpu:0", "cpu:1"): 4.0, ("cpu:1", "cpu:0"): 1.0}
    )
    cut = Cut(global_batch=12, num_ranks=2, micro_batch=3)
    (said,) = describe_transfers(cost, cut)
    assert re.fullmatch(
        r"a step moves 6 tensors between devices, 70 B \(cpu:0 to cpu:1 68 B; cpu:1 to cpu:0 2 B\)", said.what
    )
    assert describe_transfers(None, cut) == ()


def test_what_lies_on_one_device_moves_nothing() -> None:
    session: Any = session_of(Tiny(), config_of("placement", 'layout.placement={"*" = "cpu:1"}'))
    assert "a step moves 0 tensors between devices, 0 B, because" in " ".join(map(str, session.decisions))
