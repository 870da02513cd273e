"""Mistakes in allranks itself that verify has to find, by the law of the design that each breaks.

Each is one of `MISTAKES` of a program below tests/programs, made only where several processes run. The table in
docs/explanation/verify.md is made of this list, and test_task_verify.py runs every line of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

START, LOAD = "start", "load"


@final
@dataclass(frozen=True)
class Mistake:
    """One of them.

    Attributes:
        law: of docs/explanation/concepts.md that is broken.
        name: in `MISTAKES` of the program.
        what: is done, in words.
        kind: of the first finding; START: the run's own comparison before its first step refuses; LOAD: reading the
            checkpoint back is refused.
        layout, words: with which the program is verified.
        program: below tests/programs.
    """

    law: int
    name: str
    what: str
    kind: str
    layout: str = "ddp"
    words: tuple[str, ...] = ()
    program: str = "mutants"


def _new(law: int, name: str, what: str, kind: str, layout: str = "ddp", *words: str) -> Mistake:
    return Mistake(law, name, what, kind, layout, words, "law_mutants")


DEEP_BLOCKS, EXPERT_BLOCKS = "task.blocks=deep", "task.blocks=experts"

OURS = (
    Mistake(1, "rate times ranks", "the learning rate is multiplied by the number of ranks", "S23"),
    Mistake(2, "ranks with equal data", "every rank is fed the samples of the first", "S4"),
    _new(2, "filler counts", "the loss of a rank that has no sample left counts", "S16", "ddp", "train.micro_batch=1"),
    Mistake(3, "missing divide", "the sum is not divided by what DDP has multiplied it with", "S9"),
    Mistake(3, "average of averages", "an evaluation averages the ranks' averages", "S30"),
    _new(3, "sum for mean", "FSDP's gradients are added up, and not averaged", "S9", "fsdp"),
    Mistake(4, "no synchronisation", "no micro-step reduces gradients", "S11"),
    Mistake(4, "wrong norm", "the norm that clips is too large", "S13"),
    Mistake(4, "tied twice in the norm", "a tied parameter counts twice in it", "S13"),
    Mistake(4, "a billionth", "one gradient is off by 1e-9, in float64", "S16"),
    Mistake(4, "two percent", "one gradient is off by 2%, in bfloat16", "S16", words=("train.precision=bfloat16",)),
    _new(
        4, "norms of a part", "tp: a norm that sees some positions keeps its own gradient", START, "tp=2", DEEP_BLOCKS
    ),
    _new(4, "norms of a part, in steps", "the same, from the first step on only", "S15", "tp=2", DEEP_BLOCKS),
    _new(
        4, "tied apart", "pp: the head's gradient does not reach the embedding that it is", START, "pp=2", DEEP_BLOCKS
    ),
    _new(4, "tied apart, in steps", "the same, from the first step on only", "S15", "pp=2", DEEP_BLOCKS),
    _new(
        4,
        "experts by ep",
        "ep: experts are divided by the ranks that hold them",
        START,
        "dp_replicate=2,ep=2",
        EXPERT_BLOCKS,
    ),
    _new(
        4,
        "experts by ep, in steps",
        "the same, from the first step on only",
        "S36",
        "dp_replicate=2,ep=2",
        EXPERT_BLOCKS,
    ),
    _new(5, "initial values of a shard redrawn", "one rank draws one tensor's values itself", "S32", "fsdp"),
    Mistake(6, "dropout seeds equal", "every rank seeds its micro-steps as the first does", "S6"),
    _new(7, "reduced in bfloat16", "DDP adds gradients up in bfloat16", "S37"),
    Mistake(8, "resume at another position", "a resume begins a batch too late", "S20"),
    Mistake(8, "optimizer state not restored", "a resume begins with an empty optimizer", "S17"),
    Mistake(8, "buffers not restored", "a resume begins with empty buffers", "S17", words=("task.statistics=true",)),
    _new(9, "saved tensor changed", "what is written is not what its digest is of", LOAD),
    _new(11, "targets counted alone", "every rank takes its own count of targets for the world's", "S16"),
    Mistake(12, "wrong ledger", "the ledger counts one too many", "other"),
)

LAWS: Mapping[int, str] = {
    1: "meaning does not depend on the layout",
    2: "order and cut of the samples",
    3: "the loss is a sum, divided once",
    4: "equal to one device",
    5: "initial values",
    6: "randomness is a function",
    7: "one precision everywhere",
    8: "what matters is in the checkpoint",
    9: "a checkpoint is whole or absent",
    10: "one step for training, verify and dryrun",
    11: "no rank decides alone",
    12: "the ledger is evidence",
    13: "no wait on the compute stream",
    14: "decisions are printed",
    15: "no orphans, no second writer",
}
"""Of the design, in a few words."""

UNSEEN: Mapping[int, str] = {
    10: "verify rests on it, and calls training's own `assemble`; tests compare the reducer's twin with the reducer",
    13: "a wait on the compute stream changes no value: `bench/overhead.py` and the profiler's picture show it",
    14: "words are no values: tests read what commands print",
    15: "verify has no second writer and outlives its workers: tests kill parents",
}
"""Laws of which verify sees nothing, and what looks after them."""
