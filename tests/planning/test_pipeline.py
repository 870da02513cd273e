"""Stages, micro-steps under way, and bubbles, against the papers' formulas."""

import importlib
from typing import Any

import pytest

from allranks.named_models import find_model
from allranks.planning.operation_times import is_product
from allranks.planning.pipeline import (
    WAITING,
    parted_share,
    pipeline_seconds,
    shared_bubble,
    shared_out,
    stages_of,
    under_way,
)
from tests.planning.profiles import decoder
from tests.planning.torch_orders import orders_of, play


@pytest.fixture(scope="module")
def schedules() -> Any:
    """torch's; what it imports sets an environment variable, before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    return importlib.import_module("torch.distributed.pipelining.schedules")


def layers_of(total: int, pp: int, chunks: int = 1) -> list[int]:
    stages = shared_out((1, total, 1), (False, True, False), pp, chunks)
    assert [stage[0] for stage in stages] == [1] + [0] * (pp - 1)
    assert [stage[2] for stage in stages] == [0] * (pp - 1) + [1]
    return [stage[1] for stage in stages]


def test_layers_that_divide_are_shared_evenly() -> None:
    assert layers_of(96, 8) == [12] * 8


def test_the_ends_hold_fewer_where_layers_do_not_divide() -> None:
    assert layers_of(126, 16) == [7, *[8] * 14, 7]  # Llama 3 405B
    assert layers_of(31, 4) == [8, 8, 8, 7]
    assert layers_of(30, 4) == [7, 8, 8, 7]


@pytest.mark.parametrize(("total", "pp"), [(61, 16), (3, 2), (7, 4), (10, 7)])
def test_no_layer_is_lost(total: int, pp: int) -> None:
    assert sum(layers_of(total, pp)) == total


def test_a_profile_is_cut_into_as_many_stages() -> None:
    assert [sum(stage) for stage in stages_of(decoder(layers=8), 4, 1)] == [3, 2, 2, 3]


def test_micro_steps_under_way() -> None:
    assert [under_way("1f1b", stage, 4, 1, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert under_way("1f1b", 0, 4, 1, 2) == 2  # no more than there are
    assert under_way("gpipe", 3, 4, 1, 16) == 16
    # 2205.05198, section 4.2.3: the first rank of an interleaved schedule holds p (1 + (p - 1) / (p m)) layers' worth.
    pp, chunks = 8, 3
    assert under_way("interleaved", 0, pp, chunks, 64) == pytest.approx(pp * (1 + (pp - 1) / (pp * chunks)))
    assert under_way("zb-2p", 0, 8, 1, 64) == 15  # 2401.10241: 2p - 1
    assert under_way("1f1b", 0, 1, 1, 64) == 1


def test_the_bubble_of_1f1b_is_p_minus_1_micro_steps() -> None:
    forward, backward, weight = [1.0] * 4, [1.0] * 4, [1.0] * 4
    steady, bubble = pipeline_seconds("1f1b", forward, backward, weight, 1, 16)
    assert (steady, bubble) == (48.0, 9.0)  # 2104.04473, section 2.2.1: (p - 1)(F + B + W)
    assert pipeline_seconds("interleaved", forward, backward, weight, 3, 16) == (48.0, 3.0)
    assert pipeline_seconds("gpipe", forward, backward, weight, 1, 16) == (48.0, 9.0)


def test_zero_bubbles() -> None:
    forward, backward, weight = [2.0] * 4, [2.0] * 4, [1.0] * 4
    # 2401.10241, table 1: ZB-H1 leaves (p - 1)(F + B - W), ZB-H2 (p - 1)(F + B - 2W).
    assert pipeline_seconds("zb-1p", forward, backward, weight, 1, 16)[1] == 3 * (2 + 2 - 1)
    assert pipeline_seconds("zb-2p", forward, backward, weight, 1, 16)[1] == 3 * (2 + 2 - 2)


def test_zero_bubbles_part_every_backward_and_dualpipev_those_at_its_ends() -> None:
    assert [parted_share(name, 4, 8) for name in ("gpipe", "1f1b", "interleaved", "looped_bfs")] == [0.0] * 4
    assert [parted_share(name, 4, 8) for name in ("interleaved_zb", "zbv", "zb-1p")] == [1.0] * 3
    assert parted_share("dualpipev", 4, 8) == 7 / 16 and parted_share("dualpipev", 4, 2) == 1.0
    assert parted_share("zbv", 1, 8) == 0.0


@pytest.mark.parametrize("pp", [2, 4])
def test_dualpipev_parts_as_many_backwards_as_torch_schedules(schedules: Any, pp: int) -> None:
    micro_steps = 2 * pp
    first = orders_of(schedules, "dualpipev", pp, 2, micro_steps)[0]
    parted = sum(visit.kind == "BACKWARD_INPUT" for visit in first)
    assert parted_share("dualpipev", pp, micro_steps) == parted / (2 * micro_steps)


SCHEDULES = [
    *(("gpipe", 1), ("interleaved", 2), ("interleaved", 3), ("looped_bfs", 2), ("interleaved_zb", 2)),
    *(("interleaved_zb", 3), ("zbv", 2), ("dualpipev", 2)),
]
PIPELINES = [(2, 6), (3, 9), (4, 12), (8, 24)]


@pytest.mark.parametrize(("pp", "micro_steps"), PIPELINES)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_bubbles_are_those_of_torchs_own_orders(
    schedules: Any, schedule: str, chunks: int, pp: int, micro_steps: int
) -> None:
    """Of equal stages: the input's gradients take as long as the forward or longer, those of weights no longer."""
    orders = orders_of(schedules, schedule, pp, chunks, micro_steps)
    for one in ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 3.0, 0.4), (1.0, 1.5, 1.4)):
        forward, backward, weight = ([chunks * seconds] * pp for seconds in one)
        planned = sum(pipeline_seconds(schedule, forward, backward, weight, chunks, micro_steps))
        assert planned == pytest.approx(play(orders, one)[0])


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_as_many_micro_steps_are_under_way_as_in_torchs_own_orders(schedules: Any, schedule: str, chunks: int) -> None:
    """On every rank; under interleaved_zb with what waits with the halves of weights, half of its activations each."""
    waits = 0.5 if schedule == "interleaved_zb" else 0.0
    for pp, micro_steps in PIPELINES[:-1]:
        _, most = play(orders_of(schedules, schedule, pp, chunks, micro_steps), (1.0, 1.0, 1.0), waits)
        planned = [under_way(schedule, rank, pp, chunks, micro_steps) for rank in range(pp)]
        assert planned == pytest.approx([number / chunks for number in most])


def test_what_waits_with_a_half_of_weights_are_the_gradients_of_what_products_gave() -> None:
    """As wide as these results are, beside all that the block keeps."""
    for name in ("llama3-8b", "llama3-70b", "llama3-405b"):
        block = next(block for block in find_model(name).profile(8192).blocks if block.repeated)
        given = sum(operation.output_bytes for operation in block.operations if is_product(operation))
        assert given / block.saved_bytes == pytest.approx(WAITING, abs=0.02)


def test_the_slowest_stage_sets_the_pace() -> None:
    assert pipeline_seconds("1f1b", [1.0, 3.0], [1.0, 3.0], [1.0, 3.0], 1, 10) == (90.0, 3.0)
    assert pipeline_seconds("1f1b", [1.0], [2.0], [3.0], 1, 10) == (60.0, 0.0)


def test_processes_that_share_cores_fill_each_others_bubbles() -> None:
    """Four equal stages at half a core each, four micro-steps of a second: 4 s of work, 3 s idle."""
    steady, bubble = pipeline_seconds("1f1b", [0.5] * 4, [0.5] * 4, [0.0] * 4, 1, 4)
    assert (steady, bubble) == (4.0, 3.0)
    assert shared_bubble(steady, bubble, work=4.0, cores=0.5) == 0.0
    # One micro-step: the path of 4 s goes twice as fast, while nobody else needs the cores.
    assert shared_bubble(1.0, 3.0, work=1.0, cores=0.5) == 1.0
    assert shared_bubble(1.0, 3.0, work=1.0, cores=1.0) == 3.0
    # The slowest stage works for longer than the mean: its core is not all its own.
    assert shared_bubble(4.0, 1.0, work=2.0, cores=0.5) == 0.0
