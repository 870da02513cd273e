"""offload=parameters: what leaves the device, what the link and the host's processors take, what the host holds."""

from typing import Any

import pytest

from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.plan import Choice, Estimate
from allranks.planning.block_cost import Parameters
from allranks.planning.estimate import estimate
from allranks.planning.host_parameters import HOST_BANDWIDTH, host_cost, waits_on_host
from allranks.planning.setting import Setting, setting_of
from tests.planning.profiles import choose, cluster, decoder

PROFILE = decoder(layers=16, hidden=2048, ffn=8192, seq=1024, heads=16, kv_heads=16, vocab=1024)
P = float(PROFILE.parameters)
EXPERTS = find_model("mixtral-8x7b", layers=2).profile(1024)


def of(global_batch: int = 8, micro_batch: int = 1, *, where: dict[str, Any] | None = None, **layout: Any) -> Estimate:
    made = Layout(**{"dp_shard": 8, **layout})
    return estimate(PROFILE, cluster(**(where or {})), Choice(made, global_batch, micro_batch))


def test_state_leaves_the_device() -> None:
    kept, moved = of(16), of(16, offload="parameters")
    assert kept.memory.weights + kept.memory.optimizer == pytest.approx(12 * P / 8)
    assert (moved.memory.weights, moved.memory.optimizer) == (0.0, 0.0)
    assert kept.memory.gradients - moved.memory.gradients == pytest.approx(4 * P / 8)  # that are not being made
    assert moved.memory.activations == kept.memory.activations
    assert kept.memory.gathered < moved.memory.gathered < 2 * kept.memory.gathered


def test_a_node_keeps_all_of_its_shards() -> None:
    assert of(offload="parameters").host_bytes == pytest.approx(16 * P)
    assert of(offload="parameters", where={"host_memory_bytes": 20 * P}).fits_host
    assert not of(offload="parameters", where={"host_memory_bytes": 19 * P}).fits_host
    both = of(offload="all").host_bytes
    assert both == pytest.approx(16 * P + of(offload="activations").host_bytes)


def test_the_hosts_processors_update() -> None:
    """8 shards in one memory: 28 bytes for each of the model's parameters, whatever the number of devices."""
    assert of(offload="parameters").time.optimizer == pytest.approx(28 * P / HOST_BANDWIDTH)
    assert of(offload="parameters").time.optimizer > of().time.optimizer


def test_a_slow_link_is_waited_for() -> None:
    """4 bytes a parameter of the shard, in the forward and in the backward, beyond what computation hides."""
    slow, slower = (of(offload="parameters", where={"host_bandwidth": rate}) for rate in (1e9, 0.5e9))
    assert slower.time.offload - slow.time.offload == pytest.approx(2 * 4 * P / 8 * (1 / 0.5e9 - 1 / 1e9))
    assert of(offload="parameters", where={"host_bandwidth": 1e13}).time.offload == pytest.approx(0.0)
    # Where nothing is gathered again, the gradients still go out: as many bytes, the other way.
    once = of(offload="parameters", sharding="grad_op", where={"host_bandwidth": 0.5e9})
    assert once.time.offload == pytest.approx(slower.time.offload)


def test_gradients_of_further_micro_steps_are_added_on_the_host() -> None:
    """Three of four are waited for, 4 bytes each over the link, and added with 12 bytes of the host's bandwidth."""
    fast = {"host_bandwidth": 1e12}
    four = of(32, offload="parameters", where=fast)
    assert four.time.offload == pytest.approx(3 * (4 * P / 8 / 1e12 + 12 * P / HOST_BANDWIDTH))


def test_experts_wait_where_they_are_sharded() -> None:
    """An eighth of the rest, and a quarter of the half that a rank has of the experts."""
    setting = setting_of(choose(64, 1, dp_shard=8, ep=2, offload="parameters"))
    assert host_cost(cluster(), setting, Parameters(8e6, 8e6, 8e6, 8e6)).kept_bytes == 16 * (1e6 + 2e6)
    assert estimate(EXPERTS, cluster(), choose(64, 1, dp_shard=8, ep=2, offload="parameters")).memory.weights == 0


def test_experts_that_are_whole_stay() -> None:
    setting = setting_of(choose(64, 1, dp_shard=8, ep=8, offload="parameters"))
    assert host_cost(cluster(), setting, Parameters(8e6, 8e6, 8e6, 8e6)).kept_bytes == 16 * 1e6
    whole = estimate(EXPERTS, cluster(), choose(64, 1, dp_shard=8, ep=8))
    away = estimate(EXPERTS, cluster(), choose(64, 1, dp_shard=8, ep=8, offload="parameters"))
    each = sum(o.parameters for block in EXPERTS.blocks for o in block.operations * block.count if o.cut == "expert")
    assert away.memory.weights == pytest.approx(4 * each / 8), "all of them, and nothing else"
    assert away.memory.optimizer == pytest.approx(8 * each / 8)
    assert away.memory.optimizer < whole.memory.optimizer
    alone = setting_of(choose(64, 1, dp_shard=8, offload="parameters"))
    assert host_cost(cluster(), alone, Parameters(8e6, 8e6, 8e6, 8e6)).kept_bytes == 16 * 2e6


def test_nothing_waits_unless_asked() -> None:
    assert not waits_on_host(Setting(8, 1)) and not waits_on_host(Setting(8, 1, offload="activations"))
    assert host_cost(cluster(), Setting(8, 1), Parameters(1e9, 0.0, 1e9)).kept_bytes == 0.0
