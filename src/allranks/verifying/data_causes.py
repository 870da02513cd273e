"""What ranks are fed, against one device: samples by their digests."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from allranks.stepping.feeding import SEEDED
from allranks.verifying.epoch_causes import period_of
from allranks.verifying.evidence import Evidence, largest
from allranks.verifying.findings import OTHER, Finding, found
from allranks.verifying.gradient_causes import common_factor
from allranks.verifying.low_precision import judge_low_precision
from allranks.verifying.recording import RunRecord, StepRecord

UNPADDED = "let no sample come twice: allranks.data.Sampler in its place, or drop_last=True, on one device too"
WHOLE = "let dataset() hold all samples on every rank, whatever its rank is: allranks gives each rank its part"


def judge_samples(evidence: Evidence, step: int) -> list[Finding]:
    """Whether the ranks together are fed in `step` what one device is, each sample as often.

    Of packed batches it is seen where ranks are fed the same one; parts of one are other batches, of which nothing is
    said: gradients and values tell.
    """
    one, ranks = evidence.step(step)
    due, fed = Counter(one.rows), _of_all(evidence, ranks)
    if due == fed:
        return []
    axis, counts = evidence.world.data_axis, f"one device has {len(one.rows)} samples, the ranks {fed.total()}"
    if not due - fed and not _repeated(ranks) and _is_filled_up(evidence, step, fed - due):
        before = f"{(fed - due).total()} of them were fed before: so a sampler fills up what the ranks do not divide"
        return [found("S2", f"step {step}: the ranks are fed some samples twice", counts, before, axis=axis, step=step,
                      next=UNPADDED)]  # fmt: skip
    firsts = [set(ranks[rank].rows) for rank in evidence.world.firsts]
    overlapping = set(fed) == set(due) and sum(map(len, firsts)) > len(set(fed))
    repeated = overlapping or _repeated(ranks)
    if fed.total() != due.total() and set(fed) <= set(_everything(evidence.one.run)) and not repeated:
        factor = fed.total() / max(1, due.total())
        axis = evidence.world.by_factor(factor, axis)
        said = evidence.world.in_words(factor, axis)
        return [
            found("S24", f"step {step}: the ranks are fed {said} times the samples", counts,
                  axis=axis, factor=said, step=step)
        ]  # fmt: skip
    if repeated:
        axis = evidence.world.apart(lambda rank, other: _share(ranks[rank], ranks[other]), axis)
        return [
            found("S4", f"step {step}: samples are fed to more than one rank", counts, _overlap(ranks),
                  axis=axis, step=step)
        ]  # fmt: skip
    repeats = _epoch_repeats(evidence)
    if repeats:
        return [
            found("S1", f"step {step}: the ranks begin the epoch in the order of the one before", repeats, step=step)
        ]
    if one.packed or any(record.packed for record in ranks):
        return []
    lost, extra = due - fed, fed - due
    kind = "S3" if not extra else "S2" if not lost else OTHER
    mend = {OTHER: "cut one global order over the ranks, the same for every number of them"}
    return [
        found(kind, f"step {step}: the ranks are fed other samples than one device", counts,
              f"{lost.total()} of one device's are missing, {extra.total()} are too many",
              axis=axis, step=step, next=mend.get(kind, ""))
    ]  # fmt: skip


def _is_filled_up(evidence: Evidence, step: int, extra: "Counter[int]") -> bool:
    """Whether what the ranks are fed too much is less than one sample for each, all of which they have had before: so
    DistributedSampler makes their shares equally long, of samples that the ranks do not divide.
    """
    one, ranks = evidence.step(step)
    shares = {len(ranks[rank].rows) for rank in evidence.world.firsts}
    if len(shares) > 1 or len(one.rows) % evidence.world.data_ranks == 0:
        return False
    before = {row for run in evidence.ranks for record in run.steps[:step] for row in record.rows}
    now = set(one.rows)
    return 0 < extra.total() < evidence.world.data_ranks and set(extra) <= before | now


def judge_fed(evidence: Evidence, step: int) -> list[Finding]:
    """The same, but of samples that are other ones only where the gradients do not show that they are the same.

    They may differ by what nothing computes with: the number of a graph in its batch, say.
    """
    samples = judge_samples(evidence, step)
    return [] if samples and samples[0].verdict.kind == OTHER and _is_numbered_anew(evidence, step) else samples


def _is_numbered_anew(evidence: Evidence, step: int) -> bool:
    """Whether an own loop's gradients are those of one device, or off as other samples never make them: by one factor,
    or otherwise on each rank.
    """
    one, ranks = evidence.step(step)
    if one.values or largest(one.gradients) == 0:
        return False
    if evidence.one.lowered is not None:  # its later steps are not compared
        return step == 0 and not judge_low_precision(evidence)
    raw = set(one.raw) if all(record.raw for record in ranks) else set()  # what is left of them by clipping comes after
    every = [m for m in evidence.compare(step, "raw") if raw]
    every += [m for m in evidence.compare(step, "gradients") if m.name not in raw]
    off = [m for m in every if not (m.missing and m.size == 0.0)]
    if not off or any(not m.agree for m in off):
        return True
    numbers = sum((one.raw if m.name in raw else one.gradients)[m.name].value.numel() for m in off)
    return numbers > 1 and abs(common_factor(off)) > 0.0  # a single number is always a multiple; nan is no factor


def judge_values(evidence: Evidence, step: int) -> list[Finding]:
    """Whether samples of a Task have on the ranks the values that they have on one device, at the same place.

    That explains gradients that differ, and is no mistake by itself: a sample may hold what no forward reads. Where
    batches are filled up to different shapes nothing is said.
    """
    one, ranks = evidence.step(step)
    off = {rank: [row for row in record.values if _is_other(record, one, row)] for rank, record in enumerate(ranks)}
    told = [rank for rank, rows in off.items() if rows]
    if not told:
        return []
    fed = Counter(ranks[rank].values[row][1] for rank in evidence.world.firsts for row in ranks[rank].values)
    due = Counter(digest for _, digest in one.values.values())
    known = {digest for other in evidence.one.run.steps for _, digest in other.values.values()}
    if any(count > max(1, due[digest]) for digest, count in fed.items()):
        kind, more, advice = "S4", ["some values are fed more than once"], WHOLE
    elif set(fed) <= known:
        kind, more, advice = "S3", ["they are those of other samples"], WHOLE
    else:
        kind, more, advice = "S5", [], SEEDED
    said = f"{len(off[told[0]])} of its {len(ranks[told[0]].rows)} samples, which have the same places in the order"
    return [found(kind, f"step {step}: samples have other values on rank {told[0]} than on one device", said, *more,
                  axis=evidence.world.axis_of(told), step=step, next=advice)]  # fmt: skip


def _is_other(record: StepRecord, one: StepRecord, row: int) -> bool:
    (shapes, digest), due = record.values[row], one.values.get(row)
    return due is not None and shapes == due[0] and digest != due[1]


def _of_all(evidence: Evidence, ranks: Sequence[StepRecord]) -> "Counter[int]":
    """What the world is fed: of ranks that share their samples one tells."""
    return sum((Counter(ranks[rank].rows) for rank in evidence.world.firsts), Counter())


def _everything(run: RunRecord) -> set[int]:
    return {row for step in run.steps for row in step.rows}


def _repeated(ranks: Sequence[StepRecord]) -> bool:
    """Whether most of what some rank is fed, another one is fed as well."""
    for index, one in enumerate(ranks):
        for other in ranks[index + 1 :]:
            if _share(one, other):
                return True
    return False


def _share(one: StepRecord, other: StepRecord) -> bool:
    """Whether most of what one is fed, the other is fed as well."""
    common = set(one.rows) & set(other.rows)
    return bool(common) and 2 * len(common) >= len(set(one.rows))


def _overlap(ranks: Sequence[StepRecord]) -> str:
    rows = [set(record.rows) for record in ranks]
    pairs = [(0, len(ranks) - 1), *combinations(range(len(ranks)), 2)]
    one, other = max(pairs, key=lambda pair: len(rows[pair[0]] & rows[pair[1]]))
    return f"{len(rows[one] & rows[other])} of rank {one}'s {len(rows[one])} samples are also rank {other}'s"


def _epoch_repeats(evidence: Evidence) -> str:
    """In words, where the ranks' order of samples begins anew and one device's does not."""
    period = period_of([step.rows for step in evidence.ranks[0].steps])
    alone = period_of([step.rows for step in evidence.one.run.steps])
    if period and period != alone:
        return (
            f"rank 0 is fed the same samples every {period} steps, one device {f'every {alone}' if alone else 'never'}"
        )
    return ""


def judge_seeds(evidence: Evidence) -> list[Finding]:
    """Ranks that draw random numbers for every batch, from the same state: augmentation alike for other samples."""
    world = evidence.world
    others = [step for step in range(evidence.num_steps) if judge_samples(evidence, step)]
    if not others or not judge_fed(evidence, others[0]):
        return []  # each draws for all, and takes its own part; in later steps a mistake of an earlier one may show
    for library, name in enumerate(("torch", "numpy", "python")):
        for step in (step for step in others if step):
            _, ranks = evidence.step(step)
            drew = [len(record.drew) > library and record.drew[library] for record in ranks]
            states = {record.seeds[library] for record in ranks if record.seeds}
            rows = {tuple(record.rows) for record in ranks}
            if all(drew) and len(states) == 1 and len(rows) == world.size > 1:
                said = f"before step {step} {name}'s generator has one state on all {world.size} ranks, and draws"
                return [found("S5", f"the ranks make different samples from the same random numbers of {name}", said,
                              axis=world.data_axis, step=step)]  # fmt: skip
    return []
