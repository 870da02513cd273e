"""What would help where a step does not fit: changes that save memory, each rehearsed, the cheapest in speed first."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from allranks.cli.rehearsed_question import Asked, choice_of, profile_of, question_of
from allranks.errors import AllranksError
from allranks.layout import Layout
from allranks.rehearsal import RankRehearsal, Rehearsal, Remedy

if TYPE_CHECKING:
    from allranks.rehearsing.whole import Question
    from allranks.task import Task

STRING = "--layout "
CHUNK = 1024
"""Positions whose logits are held at once, where that is tried."""


def find_remedies(asked: Asked, told: Rehearsal) -> list[Remedy]:
    """Changes that save memory: by what they cost of speed; the refused ones last.

    Each is rehearsed on the fullest rank of each stage, because another stage may be the fullest then. Those that save
    nothing come behind those that do.
    """
    from allranks.rehearsing.whole import rehearse

    fullest = max(told.ranks.values(), key=lambda rank: rank.peak_bytes)
    speed, ranks = Speed.of(question_of(asked), fullest.flops), ",".join(map(str, _fullest_of_stages(told)))
    found = []
    for change in changes_of(asked):
        try:
            question = question_of(replace(changed(asked, change), ranks=ranks))
            then = rehearse(question)
        except AllranksError as error:
            found.append(Remedy(change, None, str(error)))
        else:
            slower, by = speed.compare(question, then.ranks[fullest.rank].flops)
            margin, fits = then.margin_bytes, then.fits
            found.append(Remedy(change, then.peak_bytes, slower=slower, by=by, margin_bytes=margin, fits=fits))
    return sorted(found, key=lambda remedy: _order(remedy, fullest.peak_bytes))


def _fullest_of_stages(told: Rehearsal) -> list[int]:
    """Of each stage that was rehearsed the rank with the largest peak."""
    found: dict[int, RankRehearsal] = {}
    for rank in told.ranks.values():
        if rank.stage not in found or rank.peak_bytes > found[rank.stage].peak_bytes:
            found[rank.stage] = rank
    return [rank.rank for rank in found.values()]


def _order(remedy: Remedy, peak_bytes: int) -> tuple[int, float, float]:
    if remedy.peak_bytes is None:
        return 2, 0.0, 0.0
    return int(remedy.peak_bytes >= peak_bytes), remedy.slower or 0.0, remedy.peak_bytes


def changes_of(asked: Asked) -> list[str]:
    """Config keys, or a layout, that save memory, as far as they change something here."""
    return list(_changes(question_of(asked)))


def _changes(question: "Question") -> Iterator[str]:
    from allranks.training.shortage import halve

    layout, train = question.layout, question.config.train
    if layout.recompute == "none":
        yield "layout.recompute=selective"
    if layout.recompute in ("none", "selective"):
        yield "layout.recompute=full"
    if train.micro_steps is None and (half := halve(question.config, layout)) is not None:
        yield f"train.micro_batch={half.train.micro_batch}"
    shared = _shared(layout)
    if shared != layout:
        yield f"{STRING}{shared}"
    if layout.offload == "none" and question.cluster.device.kind == "cuda":
        if layout.fully_sharded and layout.dp_shard > 1:
            yield "layout.offload=parameters"
        yield "layout.offload=activations"
    if _holds_more_logits(question.task):
        yield f"task.chunk={CHUNK}"


def _holds_more_logits(task: "Task") -> bool:
    """Whether a Task has a setting `chunk`, and by it the logits of more than CHUNK positions at once: 0, None are all.

    What another Task does with its logits is its own code, which no key changes.
    """
    chunk = task.settings.get("chunk", CHUNK)
    return chunk is None or (type(chunk) is int and not 0 < chunk <= CHUNK)


def _shared(layout: Layout) -> Layout:
    """The layout whose data-parallel ranks share all that they can: parameters, gradients and the optimizer's state."""
    return replace(layout, dp_replicate=1, dp_shard=layout.dp, sharding="full") if layout.dp > 1 else layout


def changed(asked: Asked, change: str) -> Asked:
    """The question with one change, which beats what the layout string says of it."""
    if change.startswith(STRING):
        return replace(asked, layout=change.removeprefix(STRING))
    name = change.partition("=")[0].removeprefix("layout.")
    parts = [part for part in (asked.layout or "").split(",") if part.partition("=")[0].strip() != name]
    return replace(asked, arguments=(*asked.arguments, change), layout=asked.layout and ",".join(parts))


@final
@dataclass(frozen=True)
class Speed:
    """How long a step takes: by the planner's estimate, and where there is none, or it sees no change, by FLOPs.

    Attributes:
        question, flops: before a change, of the fullest rank.
        seconds: as the planner estimates them; None where it cannot.
    """

    question: "Question"
    flops: float
    seconds: float | None

    @classmethod
    def of(cls, question: "Question", flops: float) -> "Speed":
        """Of a question as it was asked."""
        return cls(question, flops, _estimated(question))

    def compare(self, question: "Question", flops: float) -> tuple[float, str]:
        """(By what part a changed question's step takes longer, "estimate" or "FLOPs": what says so)."""
        if self.seconds and choice_of(question) != choice_of(self.question):
            after = _estimated(question)
            if after is not None:
                return after / self.seconds - 1, "estimate"
        return (flops / self.flops - 1 if self.flops else 0.0), "FLOPs"


def _estimated(question: "Question") -> float | None:
    from allranks.planning.estimate import estimate

    try:
        return estimate(profile_of(question), question.cluster, choice_of(question)).step_seconds.expected
    except AllranksError:
        return None
