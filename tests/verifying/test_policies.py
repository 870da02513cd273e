"""FSDP2's mixed precision is taken off, but for sums in a low precision."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import allranks
from allranks.verifying.policies import without_policies, without_types
from allranks.verifying.program import Program
from tests.distributed.pool import Pools

LOW, PLAIN = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("param", "reduce", "left"),
    [
        (LOW, PLAIN, None),
        (None, None, None),
        (None, PLAIN, None),
        (PLAIN, None, None),
        (LOW, LOW, LOW),
        (LOW, None, LOW),  # gradients are added up in the type in which they are computed
        (PLAIN, torch.float16, torch.float16),
    ],
)
def test_what_is_left_of_a_policy(param: Any, reduce: Any, left: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=param)
    assert without_types(policy) == MixedPrecisionPolicy(reduce_dtype=left)


def types_of(reduce: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """(of what a layer computes, that on whose grid all gradients lie) under a policy that is taken off."""

    def build(distributed: bool) -> tuple[nn.Module, object]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        for part in (model[0], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
                        mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce, torch.float16))  # fmt: skip
        return model, torch.optim.SGD(model.parameters())

    model, _ = without_policies(Program(build, lambda model, optimizer, batches: None, [])).build(True)
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda layer, given, output: seen.append(output.dtype))
    output = model(torch.full((1, 2), 1 / 3))
    output.sum().backward()
    on_grid = all(bool((g.bfloat16().float() == g).all()) for g in (p.grad.to_local() for p in model.parameters()))
    assert output.dtype == seen[0]
    return seen[0], torch.bfloat16 if on_grid else torch.float32


@pytest.mark.distributed
def test_layers_compute_in_the_type_of_their_parameters(pool: Pools) -> None:
    for told in pool(2).run(types_of, PLAIN):
        assert told == (PLAIN, PLAIN)
    for told in pool(2).run(types_of, LOW):
        assert told == (PLAIN, LOW)


def step(model: Any, optimizer: Any, batches: Any) -> float:
    optimizer.zero_grad()
    for (x,) in batches:
        loss = ((model(x) - x) ** 2).mean()
        loss.backward()
    optimizer.step()
    return float(loss.detach())


def lowered(reduce: torch.dtype | None) -> Any:
    def build(distributed: bool) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        if distributed:
            fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce, torch.float32))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    return build


@pytest.mark.distributed
@pytest.mark.parametrize(("reduce", "kinds"), [(PLAIN, []), (None, ["S37"])])
def test_a_loop_under_fsdps_mixed_precision(reduce: Any, kinds: list[str]) -> None:
    """The usual way to run it was accused of sums in float32, and told to reduce in float32."""
    data = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)]
    answer = allranks.verify(lowered(reduce), step, data, num_steps=2)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)
