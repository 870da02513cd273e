"""The validation split, measured exactly."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

from torch import nn

from allranks.data.evaluation import evaluation_batches
from allranks.data.micro_step import MicroStep
from allranks.data.random_keys import evaluation_seed
from allranks.data.second_pass import check_begins_anew
from allranks.data.stream import draws
from allranks.errors import DataError
from allranks.parallel.batchnorm import BATCH_STATISTICS
from allranks.stepping.evaluate import evaluate
from allranks.stepping.session import Session
from allranks.training.shortage import explain_shortage, is_shortage, samples_per_forward

Batch = TypeVar("Batch")


def validate(session: Session, progress: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Mean loss per target and the Task's metrics over the validation split; {} where there is none; collective.

    Of the average of the parameters, where the run has one (`train.ema`). `progress` is called for each batch.

    Raises:
        MemoryShortError: a forward has no room.
    """
    if session.validation is None:
        return {}
    batches = _batches(session)
    try:
        with nullcontext() if session.ema is None else session.ema.in_place():
            return evaluate(session.forward, _tell_each(batches, progress), session.processes.mesh.sample_group)
    except Exception as error:
        if is_shortage(error):
            raise explain_shortage(session, error, where="an evaluation", samples=_most_samples(session)) from error
        raise


def _batches(session: Session) -> Iterator[MicroStep]:
    """This rank's part of the validation split; nothing is loaded before the first is asked for."""
    cut = session.stream.cut
    batch_size, micro_batch = _cut(session)
    return evaluation_batches(
        session.validation,
        batch_size=batch_size,
        num_ranks=cut.num_ranks,
        micro_batch=micro_batch,
        dp_rank=session.stream.dp_rank,
        seed=session.config.train.seed,
        collate=session.task.collate,
        workers=session.config.data.workers,
        count_targets=session.count_targets,
        draws=draws(session.validation),
        pin=session.processes.device.type == "cuda",
    )


def _cut(session: Session) -> tuple[int, int | None]:
    """Samples that are shared out at a time, and how many of its share a rank has in a forward; None: all of it."""
    cut = session.stream.cut
    if session.task.coupled:
        # What a loss or metric sees depends on the number of micro-steps, as in training, and never on that of ranks.
        return max(cut.num_ranks, -(-cut.global_batch // cut.num_micro_steps())), None
    if any(_looks_at_its_batch(part) for module in session.spread.modules.values() for part in module.modules()):
        return cut.global_batch, cut.micro_batch
    # no more than in training, where memory may allow no more
    return cut.global_batch, cut.micro_batch or samples_per_forward(cut)


def _looks_at_its_batch(part: nn.Module) -> bool:
    """Whether it is a BatchNorm without running statistics: its output depends on its batch in an evaluation, too."""
    return isinstance(part, BATCH_STATISTICS) and part.running_mean is None


def _most_samples(session: Session) -> int:
    """The most samples that one rank has in a forward of an evaluation."""
    batch_size, micro_batch = _cut(session)
    return micro_batch or -(-batch_size // session.stream.cut.num_ranks)


def check_validation(session: Session) -> None:
    """See before the first step that the validation split can be measured, if it is to be: what is wrong with it would
    else be told after the last one.

    Raises:
        DataError: it is empty, shards itself, or can be read only once.
    """
    if session.validation is not None and session.config.evaluate.every != 0:
        try:
            _batches(session)
            check_begins_anew(session.validation, evaluation_seed(session.config.train.seed))
        except DataError as error:
            raise DataError(f'dataset("validation"): {error}') from None


def _tell_each(batches: Iterable[Batch], progress: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        progress()
        yield batch
