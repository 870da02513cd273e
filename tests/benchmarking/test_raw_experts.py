"""The hand-written expert parallelism is DDP over whole experts."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from allranks.benchmarking.raw import build, make_mesh, raw_steps
from allranks.benchmarking.subject import make_moe
from allranks.layout import Layout
from tests.benchmarking.plain_loop import plain_losses
from tests.distributed.pool import Pools

STEPS, BATCH = 5, 8
CPU = torch.device("cpu")


def losses(layout: Layout) -> list[float]:
    """In a worker."""
    return [told() for told in raw_steps(layout, "tiny", STEPS, 0, CPU)]


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_cut_experts_learn_what_whole_ones_learn(pool: Pools, axis: str, ep: int) -> None:
    layout = Layout(ep=ep, **{axis: 4})  # type: ignore[arg-type]
    for found in pool(4).run(losses, layout):
        assert found == pytest.approx(plain_losses(STEPS, BATCH, experts=True), rel=1e-5)


@pytest.mark.distributed
def test_under_fsdp2_every_rank_has_a_quarter_of_all(pool: Pools) -> None:
    def case() -> tuple[int, ...]:
        layout = Layout(dp_shard=4, ep=2)
        model, experts = build(layout, "tiny", make_mesh(layout, CPU), CPU, None)
        assert experts is not None
        return tuple(
            sum(p.to_local().numel() for p in some if isinstance(p, DTensor))
            for some in (model.parameters(), experts.experts)
        )

    whole = {name: p.numel() for name, p in make_moe("tiny").named_parameters()}
    found = pool(4).run(case)
    assert sum(held for held, _ in found) == sum(whole.values())
    experts = sum(number for name, number in whole.items() if ".experts." in name)
    assert [held for _, held in found] == [experts // 4] * 4
