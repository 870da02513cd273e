"""How ranks drop, and what noise they draw: by the states of generators, and by what one device drops."""

from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from itertools import combinations

from allranks.verifying.data_causes import judge_fed
from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import OTHER, Finding, found
from allranks.verifying.recording import Draw, StepRecord
from allranks.verifying.world_view import WorldView

AS_ONE = "give the model that the ranks run one device's probabilities, and its mode (train() before the forward)"
COMPILED = "what dropouts draw in compiled code was not compared: there they let everything pass, and tell nothing"
FIRST, SECOND = "samples first", "sequence first"
WHOLE_MODELS = {"dp", "dp_replicate", "dp_shard", "tp", "cp"}
"""Axes whose ranks each call all layers."""
SORTS: tuple[tuple[Callable[[Draw], bool], str, str], ...] = (
    (lambda draw: not draw.noise, "drop the same units of", "dropouts"),
    (lambda draw: draw.own, "draw the same noise for", "draws"),
    (lambda draw: draw.shared, "draw the same noise for", "draws"),
)
"""What is judged for itself, as its generators are other ones: what it is, what ranks do wrongly, and its name."""


def judge_dropping(evidence: Evidence, step: int) -> list[Finding]:
    """Whether ranks drop with one device's probabilities, in as many layers: a model in eval() drops nowhere.

    Through how many dropouts a sample goes is known where each has a row for every sample of a micro-batch, and where a
    rank calls all layers. Else (tokens of experts, stages) only the probabilities are compared. What is compiled does
    not tell.
    """
    if say_compiled(evidence) or judge_fed(evidence, step):
        return []
    one, ranks = evidence.step(step)
    due = {draw.probability for draw in _dropouts(one)}
    used = [{draw.probability for draw in _dropouts(record)} for record in ranks]
    wrong = [rank for rank, some in enumerate(used) if some - due]
    said = f"one device drops with {_in_words(due)}, the ranks with {_in_words(set().union(*used))}"
    if not wrong and due == set().union(*used):
        wrong, said = _of_other_depth(evidence.world, one, ranks)
        if not wrong:
            return []
    wrong = wrong or [*range(len(ranks))]
    which = "the ranks drop" if len(wrong) == len(ranks) else f"rank {wrong[0]} drops"
    what = f"step {step}: {which} with other probabilities than one device, or in other layers"
    return [found(OTHER, what, said, axis=evidence.world.axis_of(wrong), step=step, next=AS_ONE)]


def say_compiled(evidence: Evidence) -> tuple[str, ...]:
    """That some dropouts were not looked at, where they are compiled."""
    return (COMPILED,) if any(run.compiled for run in (evidence.one.run, *evidence.ranks)) else ()


def _of_other_depth(world: WorldView, one: StepRecord, ranks: Sequence[StepRecord]) -> tuple[list[int], str]:
    """Ranks whose samples go through more or fewer layers that drop than one device's, and the two numbers."""
    due = _layers(one)
    if due is None or not {name for name, degree in world.axes.items() if degree > 1} <= WHOLE_MODELS:
        return [], ""
    depths = {rank: depth for rank, record in enumerate(ranks) if (depth := _layers(record)) not in (None, due)}
    for rank, mine in depths.items():
        apart = next(p for p in sorted(due) if (mine or {}).get(p) != due[p])
        alone, here = (f"{float((some or {}).get(apart, 0)):g}" for some in (due, mine))
        said = f"of {apart:g}, a sample goes through {alone} dropouts on one device, {here} on rank {rank}"
        return [*depths], said
    return [], ""


def _layers(record: StepRecord) -> dict[float, Fraction] | None:
    """Through how many dropouts of each probability a sample goes; None where they do not tell."""
    draws = _dropouts(record)
    if record.packed or not record.rows or any(draw.shape[0] not in record.batch_sizes for draw in draws):
        return None
    depth: dict[float, Fraction] = {}
    for draw in draws:
        depth[draw.probability] = depth.get(draw.probability, Fraction(0)) + Fraction(draw.shape[0], len(record.rows))
    return depth


def _dropouts(record: StepRecord) -> list[Draw]:
    """Of its forwards."""
    return [draw for draw in record.drawn if not draw.noise]


def _in_words(probabilities: Collection[float]) -> str:
    return ", ".join(f"{p:g}" for p in sorted(probabilities)) or "nothing"


def judge_draws(evidence: Evidence, step: int) -> list[Finding]:
    """Dropouts and noise: other ones where samples or units differ, the same where ranks hold the same."""
    one, ranks = evidence.step(step)
    findings = _recomputed(ranks, step)
    world = evidence.world
    numbers = world.firsts
    for is_one, what, word in SORTS:
        states = {rank: _states(ranks[rank], is_one, one) for rank in numbers}
        alike = [pair for pair in combinations(numbers, 2) if _begin_alike(*(states[rank] for rank in pair))]
        if alike:
            rank, other = alike[0]
            same = states[rank] & states[other]
            return [
                *findings,
                found("S6", f"step {step}: ranks {rank} and {other} {what} different samples",
                      f"{len(same)} of {len(states[rank])} {word} begin from the same state of the generator",
                      axis=_along(world, alike, world.data_axis), step=step),
            ]  # fmt: skip
    return findings + _inside(evidence, one, ranks, step)


def _begin_alike(states: set[int], others: set[int]) -> bool:
    """Whether most of some states are among others, too."""
    same = states & others
    return bool(same) and len(same) * 2 >= len(states)


def _states(record: StepRecord, is_one: Callable[[Draw], bool], one: StepRecord) -> set[int]:
    """Of the generators before what forwards have drawn of a sort.

    A draw of as many rows as a rank has samples need not be noise for them: a matrix that all ranks draw alike is
    another. On one device, which has more samples, it is none with a row for each.
    """
    dims = {len(draw.shape) for draw in one.draws if draw.shared}
    drawn = filter(is_one, record.drawn)
    return {draw.state for draw in drawn if not draw.shared or len(draw.shape) in dims}


def _recomputed(ranks: Sequence[StepRecord], step: int) -> list[Finding]:
    for rank, record in enumerate(ranks):
        other = record.drawn_otherwise
        if other:
            noise = all(draw.noise for draw in other)
            what, word = ("noise", "draws") if noise else ("dropouts", "dropouts")
            said = f"{len(other)} {word} of the backward begin from a state that no forward of the step began from"
            return [
                found("S34", f"step {step}: rank {rank} computes activations again with other {what}", said, step=step)
            ]
    return []


def _inside(evidence: Evidence, one: StepRecord, ranks: Sequence[StepRecord], step: int) -> list[Finding]:
    """Ranks with the same samples and layers: alike where the activation is whole, different where it is cut."""
    world = evidence.world
    for is_one, _, word in SORTS:
        wrong: dict[tuple[int, int], tuple[int, Draw, bool]] = {}
        for rank, twin in _layer_pairs(world):
            both = ([draw for draw in ranks[number].draws if is_one(draw)] for number in (rank, twin))
            for place, (mine, other) in enumerate(zip(*both, strict=False)):
                alike, cut = mine.state == other.state, _is_cut(mine, ranks[rank], one)
                # Shared noise is a function of the sample here: in what is cut gradients tell.
                if alike == cut and not (mine.shared and cut):
                    wrong.setdefault((rank, twin), (place, mine, cut))
        for (rank, twin), (place, mine, cut) in wrong.items():
            if mine.shared and not evidence.noise_matters():
                break
            what, kind_of = ("same", "cut") if cut else ("other", "whole on both")
            does = f"draw {what} noise for" if mine.noise else f"drop {what} units of"
            return [
                found("S7", f"step {step}: ranks {rank} and {twin} {does} an activation that is {kind_of}",
                      f"{word.removesuffix('s')} {place} of shape {list(mine.shape)}",
                      axis=_along(world, wrong, world.model_axis), step=step)
            ]  # fmt: skip
    return []


def _layer_pairs(world: WorldView) -> list[tuple[int, int]]:
    """Each two ranks with the same samples and layers."""
    return [(rank, twin) for rank in range(world.size) for twin in world.layer_twins(rank) if twin > rank]


def _is_cut(draw: Draw, record: StepRecord, one: StepRecord) -> bool:
    """Whether a rank has dropped a part of what one device drops as a whole, by shapes without their samples.

    How many samples a forward has is no matter of the layer. They are the first dim, or the second behind the
    sequence's, or several rows of the first are one sample's: a part may be one in these rows as well as in what
    follows. Numbers of rows that are filled up, or chosen, are compared where one device has the same samples.
    """
    due = {form for other in one.draws for form in _without_samples(other, one)}
    mine = _without_samples(draw, record)
    if mine & due:
        return False
    alike = sorted(record.rows) == sorted(one.rows)
    for kind, rows, rest in mine:
        wholes = [other for like, other, others in due if (like, others) == (kind, rest)]
        if (kind == SECOND or alike) and any(other > rows and other % rows == 0 for other in wholes):
            return True
    return draw.shape[1:] not in {other.shape[1:] for other in one.draws}


def _without_samples(draw: Draw, record: StepRecord) -> set[tuple[str, int, tuple[int, ...]]]:
    """What a shape may be but for the samples of a forward: (where these are, rows of a sample, other dims)."""
    found = set[tuple[str, int, tuple[int, ...]]]()
    for samples in record.batch_sizes if not record.packed and draw.shape and draw.shape[0] else ():
        if draw.shape[1:2] == (samples,):
            found.add((SECOND, draw.shape[0], draw.shape[2:]))
        if samples and draw.shape[0] % samples == 0:
            found.add((FIRST, draw.shape[0] // samples, draw.shape[1:]))
    return found


def _along(world: WorldView, pairs: Collection[tuple[int, int]], axis: str) -> str:
    """Of an axis, those along which some pairs of ranks lie."""
    return world.apart(lambda one, other: (one, other) in pairs, axis)
