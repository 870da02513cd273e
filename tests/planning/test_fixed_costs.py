"""The fixed seconds of a processor come back from programs that take exactly as long as a plan with them says."""

from dataclasses import replace

import pytest

from allranks.cluster import Cluster, FixedSeconds, Link
from allranks.planning.estimate import estimate
from allranks.planning.fixed_costs import Program, pairs, programs, solve
from tests.planning.profiles import decoder
from tests.planning.test_processor import CPU

TABLE = ((1e3, 1e-5), (1e6, 1e-3))
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
REAL = FixedSeconds(operation=2e-5, micro_step=3e-4, step=1e-3, unit_message=4e-4, move=5e-4, hop=6e-4, parting=7e-5)


def machine(count: int, cores: float = 1.0) -> Cluster:
    link = Link("loopback", 1e9, 1e-4, {name: {size: TABLE for size in (2, 4)} for name in NAMES})
    return Cluster("local", 1, count, replace(CPU, cores=cores), link, link, count)


@pytest.mark.parametrize(("count", "cores"), [(1, 1.0), (2, 1.0), (4, 1.0), (4, 0.5)])
def test_what_programs_took_is_taken_apart(count: int, cores: float) -> None:
    where = machine(count, cores)
    real = replace(where, device=replace(where.device, fixed=REAL))
    models = {program.depth: decoder(layers=program.depth) for program in programs(count)}
    took = {
        program: estimate(models[program.depth], real, program.choice(count)).time.total for program in programs(count)
    }
    found = solve(where, models, took)
    expected = REAL if count > 1 else replace(REAL, unit_message=0.0, move=0.0, hop=0.0, parting=0.0)
    for name in FixedSeconds.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-9), name


def test_what_the_estimate_explains_or_nobody_measured_is_nothing() -> None:
    where = machine(2)
    models = {program.depth: decoder(layers=program.depth) for program in programs(2)}
    assert solve(where, models, {}) == FixedSeconds()
    alike = solve(where, models, dict.fromkeys(programs(2), 1e-9))
    assert replace(alike, parting=0.0) == FixedSeconds()
    assert alike.parting > 0, "as long as with whole backwards: it has cost what the shorter bubble has saved"


def test_every_figure_has_its_programs_and_each_runs_once() -> None:
    assert list(pairs(2)) == list(FixedSeconds.__dataclass_fields__)
    assert list(pairs(1)) == ["operation", "micro_step", "step"]
    assert list(pairs(16)) == ["operation", "micro_step", "step", "unit_message"]
    assert len(programs(2)) == len(set(programs(2))) == 11
    choice = Program("fsdp", 2, 3).choice(4)
    assert (choice.layout.dp_shard, choice.micro_steps, choice.global_batch) == (4, 3, 48)


def test_a_backward_in_two_parts_is_compared_with_one_in_a_single_part_over_the_same_stages() -> None:
    parted, whole = pairs(4)["parting"]
    assert whole is not None and (parted.depth, parted.micro_steps) == (whole.depth, whole.micro_steps) == (12, 8)
    choices = [program.choice(4) for program in (parted, whole)]
    assert [choice.layout.schedule for choice in choices] == ["interleaved_zb", "interleaved"]
    assert {(choice.layout.pp, choice.chunks, choice.micro_steps) for choice in choices} == {(4, 2, 8)}


def test_only_schedules_that_part_backwards_take_longer_by_it() -> None:
    where = machine(2)
    slow = replace(where, device=replace(where.device, fixed=FixedSeconds(parting=1e-3)))
    model, added = decoder(layers=8), {}
    for schedule in ("1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"):
        choice = Program(f"pp=2,schedule={schedule}", 8, 8).choice(2)
        added[schedule] = estimate(model, slow, choice).time.compute - estimate(model, where, choice).time.compute
    assert added["1f1b"] == added["interleaved"] == 0.0
    assert min(added["zbv"], added["interleaved_zb"]) > 8 * 4 * 1e-3, "of eight micro-steps of four blocks"
    assert added["dualpipev"] == pytest.approx(added["zbv"] * 3 / 16)
