"""Where parameters wait, and what is said of it; tests/distributed/test_offload_laws.py says what is computed then."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.host_parameters import choose_offload, describe_offload

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def layout_of(offload: str, ep: int = 1) -> Layout:
    return Layout(dp_shard=2, offload=offload, ep=ep)


@pytest.mark.parametrize("offload", ["parameters", "all"])
def test_on_an_accelerator_they_wait_in_pinned_memory_of_the_host(offload: str) -> None:
    policy = choose_offload(layout_of(offload), CUDA)
    assert isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
    (decision,) = describe_offload(layout_of(offload))
    assert str(decision) == (
        "parameters, gradients and the optimizer's state wait in the host's memory, and the update runs there, because "
        f"offload={offload}: the device has what is gathered; the host waits for each backward's gradients"
    )


def test_experts_that_are_sharded_wait_too() -> None:
    (decision,) = describe_offload(Layout(dp_shard=4, offload="parameters", ep=2))
    assert decision.what.startswith("parameters, gradients")


def test_experts_that_are_cut_stay() -> None:
    (decision,) = describe_offload(layout_of("parameters", ep=2))
    assert decision.what.startswith("parameters but those of cut experts, gradients")


@pytest.mark.parametrize("offload", ["none", "activations"])
def test_otherwise_they_stay_on_the_device(offload: str) -> None:
    for device in (CPU, CUDA):
        assert type(choose_offload(layout_of(offload), device)) is OffloadPolicy
    assert describe_offload(layout_of(offload)) == []


@pytest.mark.parametrize("offload", ["parameters", "all"])
def test_without_an_accelerator_it_is_refused(offload: str) -> None:
    with pytest.raises(LayoutError) as caught:
        choose_offload(layout_of(offload), CPU)
    assert str(caught.value) == (
        f"offload={offload} keeps parameters, gradients and the optimizer's state in the host's memory rather than an "
        "accelerator's, and this device is the CPU: there they are anyway; leave it out"
    )
