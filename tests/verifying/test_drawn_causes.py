"""How ranks drop, among themselves and against one device."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from allranks.verifying.drawn_causes import AS_ONE, judge_draws, judge_dropping
from allranks.verifying.evidence import Evidence
from allranks.verifying.judge import judge
from allranks.verifying.recording import Draw, OneDevice, RunRecord, StepRecord
from allranks.verifying.world_view import WorldView
from tests.verifying.records import evidence

TENSOR_WORLD = WorldView((0, 0), {"tp": 2})


def alike(ranks: list[RunRecord]) -> None:
    for run in ranks:
        for step, rows in zip(run.steps, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
            step.rows, step.batch_sizes, step.draws = list(rows), (2, 2), []


def drops(run: RunRecord) -> None:
    for step in run.steps:
        step.draws = []
    run.steps[0].draws = [Draw(1, (4, 8), False)]


def with_draws(first: Draw, second: Draw, world: WorldView = TENSOR_WORLD) -> list[str]:
    def change(ranks: list[RunRecord]) -> None:
        alike(ranks)
        ranks[0].steps[0].draws, ranks[1].steps[0].draws = [first] * 2, [second] * 2

    return [finding.verdict.kind for finding in judge(evidence(change, drops, world))]


def test_ranks_of_one_layer_drop_alike_what_is_whole_and_otherwise_what_is_cut() -> None:
    whole, cut = (2, 8), (4, 4)
    assert with_draws(Draw(1, whole, False), Draw(1, whole, False)) == []
    assert with_draws(Draw(1, whole, False), Draw(2, whole, False)) == ["S7"]
    assert with_draws(Draw(1, cut, False), Draw(2, cut, False)) == []
    assert with_draws(Draw(1, cut, False), Draw(1, cut, False)) == ["S7"]


SEQ, WIDTH = 8, 6


@pytest.mark.parametrize(
    ("whole", "alone", "mine", "samples", "cut"),
    [
        ((SEQ, 5, WIDTH), 5, (SEQ // 2, 5, WIDTH), 5, True),  # the sequence first, of which each rank has a part
        ((SEQ, 5, WIDTH), 5, (SEQ, 5, WIDTH), 5, False),
        ((SEQ, 4, WIDTH), 4, (4, 4, WIDTH), 4, True),  # a part as long as there are samples
        ((SEQ, 8, WIDTH), 8, (SEQ, 4, WIDTH), 4, False),  # beside data parallelism a rank has fewer samples
        ((SEQ, 8, WIDTH), 8, (SEQ // 2, 4, WIDTH), 4, True),
        ((5 * SEQ, WIDTH), 5, (5 * SEQ // 2, WIDTH), 5, True),  # all rows of all samples behind each other
        ((8 * SEQ, WIDTH), 8, (4 * SEQ, WIDTH), 4, False),
        ((8 * 10, WIDTH), 8, (20, WIDTH), 4, False),  # of shorter samples: no part
        ((33, WIDTH), 5, (19, WIDTH), 5, False),  # tokens of an expert
        ((8, SEQ, WIDTH), 8, (4, SEQ, WIDTH), 4, False),
        ((8, SEQ, WIDTH), 8, (4, SEQ, WIDTH // 2), 4, True),
        ((5, SEQ, WIDTH), 5, (5, SEQ // 2, WIDTH), 5, True),
    ],
)
def test_parts_of_a_sequence_and_of_units_are_told_from_fewer_samples(
    whole: tuple[int, ...], alone: int, mine: tuple[int, ...], samples: int, cut: bool
) -> None:
    """`whole` of `alone` samples on one device, `mine` of `samples` on two ranks of one layer."""
    one = StepRecord(rows=[*range(alone)], batch_sizes=(alone,), draws=[Draw(1, whole, False)])

    def kinds(*states: int) -> list[str]:
        ranks = [
            StepRecord(rows=[*range(samples)], batch_sizes=(samples,), draws=[Draw(state, mine, False)])
            for state in states
        ]
        runs = [RunRecord(steps=[rank]) for rank in ranks]
        both = Evidence(OneDevice(RunRecord(steps=[one])), runs, TENSOR_WORLD)
        return [finding.verdict.kind for finding in judge_draws(both, 0)]

    assert kinds(1, 1) == (["S7"] if cut else [])
    assert kinds(1, 2) == ([] if cut else ["S7"])


def test_ranks_of_two_stages_drop_for_themselves() -> None:
    """A stage calls what is before it and has no parameters, too, on values that nobody takes."""
    assert with_draws(Draw(1, (2, 8), False), Draw(2, (2, 8), False), WorldView((0, 0), {"pp": 2})) == []


COPIES = WorldView((0, 1, 2, 3), {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize(
    ("states", "axis"),
    [
        ((1, 2, 1, 2), "dp_replicate"),
        ((1, 1, 2, 2), "dp_shard"),
        ((1, 1, 1, 1), "dp_replicate*dp_shard"),
        ((1, 2, 2, 1), "dp_replicate*dp_shard"),  # across: neither tells
    ],
)
def test_dropouts_alike_along_one_axis_of_two(states: tuple[int, ...], axis: str) -> None:
    ranks = [StepRecord(draws=[Draw(state, (2, 4), False)]) for state in states]
    both = replace(evidence(), ranks=[RunRecord(steps=[step]) for step in ranks], world=COPIES)
    (finding,) = judge_draws(both, 0)
    assert (finding.verdict.kind, finding.axis) == ("S6", axis)


@pytest.mark.parametrize(
    ("states", "axis"), [((1, 2, 1, 2, 1, 2), "tp"), ((1, 1, 1, 2, 2, 2), "cp"), ((1, 2, 3, 4, 5, 6), "tp*cp")]
)
def test_other_units_along_one_axis_of_two(states: tuple[int, ...], axis: str) -> None:
    one = RunRecord(steps=[StepRecord(draws=[Draw(1, (2, 4), False)])])
    ranks = [RunRecord(steps=[StepRecord(draws=[Draw(state, (2, 4), False)])]) for state in states]
    world = WorldView((0,) * 6, {"tp": 3, "cp": 2} if axis == "cp" else {"tp": 2, "cp": 3})
    (finding,) = judge_draws(Evidence(OneDevice(one), ranks, world), 0)
    assert (finding.verdict.kind, finding.axis) == ("S7", axis)


def test_noise_of_one_seed_is_told_apart_from_dropouts() -> None:
    """Each for itself: that dropouts are right does not excuse the noise."""

    def draw(noise: tuple[int, int]) -> list[tuple[str, str]]:
        def change(ranks: list[RunRecord]) -> None:
            for rank, run in enumerate(ranks):
                for index, step in enumerate(run.steps):
                    drops = [Draw(1000 * rank + 10 * index + place, (2, 4), False) for place in range(3)]
                    step.draws = [*drops, Draw(noise[rank] + 10 * index, (2, 4), False, own=True)]

        def alone(run: RunRecord) -> None:
            for step in run.steps:
                step.draws = [Draw(place, (4, 4), False) for place in range(3)]

        return [(finding.verdict.kind, finding.verdict.what) for finding in judge(evidence(change, alone))]

    assert draw((7000, 8000)) == []
    ((kind, what),) = draw((7000, 7000))
    assert kind == "S6" and "step 0: ranks 0 and 1 draw the same noise for different samples" in what
    assert draw((7000, 1000)) == []  # the state of a dropout is another generator's


def shared(state: int, shape: tuple[int, ...], *, again: bool = False) -> Draw:
    return Draw(state, shape, again, shared=True)


def test_noise_of_the_generator_that_torch_shares_is_judged_too() -> None:
    """It was made a function of the sample on both sides, and nobody saw that all ranks drew the same."""

    def kinds(noise: tuple[int, int], alone: tuple[int, ...] = (4, 5)) -> list[tuple[str, str]]:
        def change(ranks: list[RunRecord]) -> None:
            for run, state in zip(ranks, noise, strict=True):
                run.steps[0].draws.append(shared(state, (2, 5)))

        def one(run: RunRecord) -> None:
            run.steps[0].draws.append(shared(7, alone))

        return [(finding.verdict.kind, finding.verdict.what) for finding in judge(evidence(change, one))]

    assert kinds((1, 2)) == []
    said = "step 0: ranks 0 and 1 draw the same noise for different samples"
    assert kinds((1, 1)) == [("S6", f"{said} (S6: data ranks drop the same units)")]
    # Of one number for each: two numbers that ranks with two samples draw alike are no noise for them on one device.
    assert kinds((1, 1), alone=(4,)) == []


def test_ranks_of_one_layer_that_draw_other_noise_are_told_where_it_matters() -> None:
    """Not where they take it from one of them; and of a part of an activation the gradients tell."""

    def kinds(mine: tuple[int, ...], states: tuple[int, int], *, matters: bool) -> list[tuple[str, str]]:
        one = StepRecord(rows=[0, 1], batch_sizes=(2,), draws=[shared(1, (2, 8))])
        # A dropout before it on one rank alone is compared with no noise.
        before: list[list[Draw]] = [[Draw(9, (2, 8), False)], []]
        ranks = [
            StepRecord(rows=[0, 1], batch_sizes=(2,), draws=[*some, shared(state, mine)])
            for some, state in zip(before, states, strict=True)
        ]
        runs = [RunRecord(steps=[rank]) for rank in ranks]
        both = Evidence(OneDevice(RunRecord(steps=[one])), runs, TENSOR_WORLD, noise_matters=lambda: matters)
        return [(finding.verdict.kind, finding.verdict.what) for finding in judge_draws(both, 0)]

    ((kind, what),) = kinds((2, 8), (1, 2), matters=True)
    assert kind == "S7" and "draw other noise for an activation that is whole on both" in what
    assert kinds((2, 8), (1, 2), matters=False) == []
    assert kinds((2, 8), (1, 1), matters=True) == []
    assert kinds((2, 4), (1, 1), matters=True) == kinds((2, 4), (1, 2), matters=True) == []


def test_noise_is_no_dropout_and_may_be_drawn_again() -> None:
    right = step_of((0, 1, 2), (3,), (3, 0.1), (3, 0.5))
    noisy = step_of((3, 4, 5), (3,), (3, 0.1), (3, 0.5))
    noisy.draws += [shared(9, (3, 8)), shared(9, (3, 8), again=True)]
    assert judged(ONE, right, noisy) == []
    alone = replace(evidence(), ranks=[RunRecord(steps=[noisy])], world=WorldView((0,)))
    assert judge_draws(alone, 0) == []
    noisy.draws.append(shared(10, (3, 8), again=True))
    (finding,) = judge_draws(alone, 0)
    assert finding.verdict.kind == "S34" and "computes activations again with other noise" in finding.verdict.what


def step_of(rows: Sequence[int], sizes: Sequence[int], *dropouts: tuple[int, float]) -> StepRecord:
    """A step in micro-batches of `sizes`, with dropouts of (rows of what is dropped, probability)."""
    draws = [Draw(place, (rows_of, 8), False, probability=p) for place, (rows_of, p) in enumerate(dropouts)]
    return StepRecord(rows=list(rows), batch_sizes=tuple(sizes), draws=draws)


def judged(one: StepRecord, *ranks: StepRecord, **axes: int) -> list[tuple[str, str]]:
    """(evidence, axis) of how the ranks drop."""
    axes = axes or {"dp": len(ranks)}
    numbers = tuple(range(len(ranks))) if "dp" in axes else (0,) * len(ranks)
    runs = [RunRecord(steps=[step]) for step in ranks]
    whole = Evidence(OneDevice(RunRecord(steps=[one])), runs, WorldView(numbers, axes))
    findings = judge_dropping(whole, 0)
    assert all(finding.verdict.next == AS_ONE for finding in findings)
    return [(finding.verdict.evidence[0], finding.axis) for finding in findings]


ONE = step_of(range(6), (3, 3), (3, 0.1), (3, 0.5), (3, 0.1), (3, 0.5))


def test_ranks_that_drop_as_one_device_does_whatever_their_micro_batches() -> None:
    first = step_of(range(4), (2, 2), (2, 0.1), (2, 0.5), (2, 0.1), (2, 0.5))
    second = step_of((4, 5), (1, 1), (1, 0.1), (1, 0.5), (1, 0.1), (1, 0.5))
    assert judged(ONE, first, second) == []


def test_another_probability() -> None:
    wrong = step_of((3, 4, 5), (3,), (3, 0.1), (3, 0.2))
    right = step_of((0, 1, 2), (3,), (3, 0.1), (3, 0.5))
    assert judged(ONE, right, wrong) == [("one device drops with 0.1, 0.5, the ranks with 0.1, 0.2, 0.5", "dp")]


def test_ranks_that_do_not_drop_at_all() -> None:
    silent = [step_of(rows, (3,)) for rows in ((0, 1, 2), (3, 4, 5))]
    assert judged(ONE, *silent) == [("one device drops with 0.1, 0.5, the ranks with nothing", "dp")]
    loud = [step_of(rows, (3,), (3, 0.1)) for rows in ((0, 1, 2), (3, 4, 5))]
    assert judged(step_of(range(6), (6,)), *loud) == [("one device drops with nothing, the ranks with 0.1", "dp")]


def test_one_rank_that_does_not_drop_and_one_layer_of_several() -> None:
    right = step_of((0, 1, 2), (3,), (3, 0.1), (3, 0.5))
    said = "of {}, a sample goes through 1 dropouts on one device, 0 on rank 1"
    assert judged(ONE, right, step_of((3, 4, 5), (3,))) == [(said.format(0.1), "dp")]
    assert judged(ONE, right, step_of((3, 4, 5), (3,), (3, 0.1))) == [(said.format(0.5), "dp")]


def test_what_does_not_tell_through_how_many_dropouts_a_sample_goes() -> None:
    """Tokens of experts, of which a rank has more than another; stages; a rank without a sample; packed batches."""
    right = step_of((0, 1, 2), (3,), (3, 0.1), (3, 0.5))
    tokens = step_of((3, 4, 5), (3,), (7, 0.1))
    assert judged(ONE, right, tokens) == []
    stages = [step_of(range(6), (6,), (6, p)) for p in (0.1, 0.5)]
    assert judged(ONE, *stages, pp=2) == []
    assert judged(ONE, *stages, tp=2) != []
    assert judged(ONE, step_of(range(6), (6,), (6, 0.1), (6, 0.5)), step_of((), (0,), (1, 0.1))) == []
    packed = replace(step_of((5,), (1,), (1, 0.1), (1, 0.1), (1, 0.5)), packed=True)
    assert judged(ONE, right, packed) == []


def test_noise_and_recomputation_are_no_dropouts_of_a_forward() -> None:
    right = step_of((0, 1, 2), (3,), (3, 0.1), (3, 0.5))
    again = step_of((3, 4, 5), (3,), (3, 0.1), (3, 0.5))
    again.draws += [Draw(9, (3, 8), True, probability=0.1), Draw(9, (3, 8), False, own=True)]
    assert judged(ONE, right, again) == []
