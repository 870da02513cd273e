"""`allranks dryrun`: the step of a rank in a world that is not there."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

from allranks.config import Config
from allranks.errors import AllranksError, TaskError
from allranks.layout import Layout
from allranks.parallel.block_modes import check_found
from allranks.parallel.blocks import find_blocks
from allranks.parallel.step_record import StepRecord
from allranks.profiling.fakes import fake_mode
from allranks.profiling.on_cuda import as_on_cuda
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.crossings import Crossings
from allranks.rehearsing.eight_bits import multiplying_in_eight_bits
from allranks.rehearsing.findings import find_own
from allranks.rehearsing.host_memory import Noted, beside_host
from allranks.rehearsing.hurried import hurried
from allranks.rehearsing.ledger import Ledger, Stored
from allranks.rehearsing.micro_steps import FewMicroSteps, fewer_micro_steps, list_each
from allranks.rehearsing.moments import homes_of_buckets, list_moments, note_deed
from allranks.rehearsing.places import LOSS, UPDATE
from allranks.rehearsing.rank_step import RankStep, assemble_rank, environment_of, mark_state, processes_of
from allranks.rehearsing.refusals import explain, starting
from allranks.rehearsing.replay import ON_HOST, Repeats, add_flops, add_messages, add_transfers, find_peak
from allranks.rehearsing.shallow import check_shallow, shallow
from allranks.rehearsing.shortening import NotShortened, follow_blocks, shorten
from allranks.rehearsing.units import receiving, watch_units
from allranks.rehearsing.walking import walking
from allranks.rehearsing.watch import Watch
from allranks.rehearsing.works import list_works
from allranks.rehearsing.world import fake_world, launched_as
from allranks.stepping.loss_window import check_window
from allranks.stepping.recomputing import check_recomputing
from allranks.task import Task, has_step
from allranks.users_code import user_line

CUDA_ROUNDING = 512
"""Bytes that CUDA's caching allocator hands out at once (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""

WORKSPACE_BYTES = 2 * 32 * 2**20
"""That cuBLAS takes from torch's allocator on Hopper and later, 32 MiB for each of two threads: that of the forward and
that of the backward. Older GPUs take a quarter (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize)."""

Found = TypeVar("Found")


@final
@dataclass(frozen=True)
class World:
    """The machine that is not there.

    Attributes:
        layout: over its processes; per_node: of them on one node.
        on_cuda: whether its devices are GPUs.
    """

    layout: Layout
    per_node: int
    on_cuda: bool

    @property
    def backend(self) -> str:
        """That training would choose there."""
        return "nccl" if self.on_cuda else "gloo"


def rehearse_rank(
    task: Task, config: Config, world: World, rank: int, *, full: bool = False, crossings: Crossings | None = None
) -> RankRehearsal:
    """One rank's step in its steady state, the second one.

    Args:
        full: trace every block and micro-step, however many are alike.
        crossings: what the stages of a pipeline are sent, kept from rank to rank.
    """
    crossings = Crossings(world.layout) if crossings is None else crossings
    asked = _Asked(task, config, world, rank, crossings)
    if crossings.lacks(rank):
        _shortest(_walk, asked, full=full)
    return _shortest(_rehearse, asked, full=full)


@final
@dataclass(frozen=True)
class _Asked:
    """One rank of a world."""

    task: Task
    config: Config
    world: World
    rank: int
    crossings: Crossings


@final
@dataclass(frozen=True)
class _Assembled:
    """A rank in its world, before its first step."""

    told: RankStep
    ledger: Ledger
    mode: Any
    few: FewMicroSteps


def _shortest(run: Callable[[_Asked, bool], Found], asked: _Asked, *, full: bool) -> Found:
    """`run` without what is alike, or, where that cannot be left out, in full."""
    # Of a step of its own a turn's gradients are reduced by name before blocks that are left out are given theirs.
    if not full and not has_step(asked.task):
        try:
            return run(asked, False)
        except NotShortened:
            pass
    return run(asked, True)


def _rehearse(asked: _Asked, full: bool) -> RankRehearsal:
    with _assembled(asked, full=full) as there:
        # On a GPU a batch waits in pinned memory, and one micro-step of it at a time is brought; stages bring all.
        stages = there.told.spread.stages
        found = _watch(asked, there, full=full, waits=asked.world.on_cuda and stages is None)
        if stages is not None:
            asked.crossings.learn(asked.rank, stages.scheduler.transport.sent)
        return found


def _walk(asked: _Asked, full: bool) -> None:
    """Learn what every stage of the rank's pipeline is sent."""
    with walking(), _assembled(asked, full=full) as there:
        told = there.told
        shorten(told.spread, asked.task.hints().blocks, full=full)
        watch = _look_on(there)
        with there.mode, watch.watching():
            _make_step(asked.task, told, watch, told.walk)
        assert told.spread.stages is not None
        asked.crossings.learn(asked.rank, told.spread.stages.scheduler.transport.sent, walked=True)


@contextmanager
def _assembled(asked: _Asked, *, full: bool) -> Iterator[_Assembled]:
    """Inside, the rank is in its world, and its model is spread."""
    task, config, world, rank = asked.task, asked.config, asked.world, asked.rank
    with starting(type(task).__name__, on_cuda=world.on_cuda):
        check_window(task, config)
        check_recomputing(task, config, world.layout)
    layout = _for_rehearsal(world, config)
    few = FewMicroSteps(config) if full else fewer_micro_steps(config, layout)
    mode, ledger = fake_mode(), Ledger(CUDA_ROUNDING if world.on_cuda else 1)
    with ExitStack() as stack:
        stack.enter_context(launched_as(environment_of(rank, layout.world_size, world.per_node)))
        stack.enter_context(fake_world(rank, layout.world_size, world.backend, asked.crossings.of(rank)))
        stack.enter_context(hurried())
        if layout.pp > 1:
            stack.enter_context(receiving(ledger))
        if few.shallow:
            stack.enter_context(shallow(few.traced))
        if world.on_cuda:
            stack.enter_context(as_on_cuda())
            if config.train.precision == "float8":
                stack.enter_context(multiplying_in_eight_bits())
        if layout.offload != "none":
            stack.enter_context(beside_host(Noted(ledger), accelerator=world.on_cuda))
        processes = processes_of(rank, layout, world.backend, world.per_node)
        with starting(type(task).__name__, on_cuda=world.on_cuda):
            told = assemble_rank(task, few.config, processes, ledger, mode)
            _check_compiled(task, told, world.layout)
        yield _Assembled(told, ledger, mode, few)


def _check_compiled(task: Task, told: RankStep, layout: Layout) -> None:
    """Training looks for the blocks that it compiles, which here run uncompiled. LayoutError as there."""
    if layout.compile == "block":
        found = find_blocks({which: told.spread.bare(which) for which in told.spread.modules}, task.hints().blocks)
        check_found(found, layout)


def _look_on(there: _Assembled) -> Watch:
    told, on_cuda = there.told, there.told.processes.choice.backend == "nccl"
    return Watch(told.spread, there.mode, there.ledger, (told.processes.agreement,), on_cuda=on_cuda)


def _watch(asked: _Asked, there: _Assembled, *, full: bool, waits: bool) -> RankRehearsal:
    """`waits`: whether what is not traced of the batch lies in the host's memory."""
    task, told, ledger, few, spread = asked.task, there.told, there.ledger, there.few, there.told.spread
    shortened = shorten(spread, task.hints().blocks, full=full)
    told.passes.absent = shortened.absent
    watch = _look_on(there)
    mark_state(told, ledger)
    watch_units(spread, ledger)
    with there.mode, watch.watching():
        # Where micro-steps are left out, they are alike, and one leaves what many leave.
        first = told.run if few.traced == few.number else told.warm_up
        _make_step(task, told, watch, first)
        _search_unused(told, lambda: _make_step(task, told, watch, first))
        if told.step.guard is not None:
            told.step.guard.begin()  # knows by now which buffers a step changes, and keeps those alone from here on
        mark_state(told, ledger)
        _record_step(task, told, watch, ledger, shortened.blocks)
    stage = min(spread.stages.pipeline.stages) if spread.stages is not None else 0
    if few.shallow:
        check_shallow(ledger.stretches)
    repeats = Repeats(shortened.times, few.find_windows(ledger.stretches, stage))
    resting = few.grow(ledger.resting, [] if waits else list_each(told, ledger))
    if asked.world.on_cuda:
        resting = [*resting, (Stored(WORKSPACE_BYTES, "cuBLAS", "other"), WORKSPACE_BYTES)]
    peak, on_host = (find_peak(resting, ledger.stretches, repeats, *where) for where in ((), (ON_HOST,)))
    return RankRehearsal(
        rank=asked.rank,
        stage=stage,
        peak_bytes=peak.num_bytes,
        by_category=peak.by_category,
        at=peak.at,
        holdings=peak.holdings,
        resting_bytes=peak.resting,
        collectives=add_messages(ledger.stretches, repeats),
        sequence=tuple(message for stretch in ledger.stretches for message in stretch.messages),
        flops=add_flops(ledger.stretches, repeats),
        findings=find_own(task.hints(), spread, told.batch.micro_steps[0].batch, told.passes.unreached),
        moments=list_moments(resting, ledger.stretches, repeats, homes_of_buckets(spread, shortened)),
        works=list_works(ledger.stretches, repeats),
        micro_steps=len(told.batch.micro_steps) + few.number - few.traced,
        traced_micro_steps=len(told.batch.micro_steps),
        traced=len(shortened.blocks) - len(shortened.left_out),
        blocks=len(shortened.blocks),
        host_peak_bytes=on_host.num_bytes,
        host_by_category=on_host.by_category,
        transfers=add_transfers(ledger.stretches, repeats),
    )


def _record_step(task: Task, told: RankStep, watch: Watch, ledger: Ledger, blocks: Sequence[str]) -> None:
    def begin(phase: str, block: str, micro_step: int) -> None:
        if told.passes.recording:
            if phase == "forward" and not block:
                gc.collect()  # what only cycles hold is gone at the same place in every trace
                told.passes.mark()
            ledger.begin(phase, block, micro_step)

    told.passes.reset = follow_blocks(told.spread, blocks, begin)
    told.passes.recording = True
    with collecting_new():
        ledger.begin("start")
        record = StepRecord(told.spread, (told.processes.agreement,), lambda deed: note_deed(ledger, deed), blocks)
        with record.recording():
            _make_step(task, told, watch, told.run)
        ledger.end()


@contextmanager
def collecting_new() -> Iterator[None]:
    """Collections look at what is made meanwhile, not at all that is imported: a fifth of a second each time.

    What the steps before left in cycles is no part of this one: it is collected first.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _make_step(task: Task, told: RankStep, watch: Watch, run: Callable[[], None]) -> None:
    try:
        run()
        if watch.lacked is not None:  # caught: where there are values, the step goes another way
            raise watch.lacked[0]
    except (AllranksError, NotShortened):
        raise
    except Exception as error:
        layout, on_cuda = told.spread.mesh.layout, told.processes.choice.backend == "nccl"
        place = watch.lacked[1] if watch.lacked and error is watch.lacked[0] else watch.places.running
        place = UPDATE if told.passes.ended and place == LOSS else place
        raise explain(type(task).__name__, error, place, layout, on_cuda=on_cuda) from error
    except SystemExit as error:
        raise TaskError(f"a step of {type(task).__name__} ends the process:\n{user_line(error)}") from error


def _search_unused(told: RankStep, again: Callable[[], None]) -> None:
    """Training looks for parameters without gradient where its first samples leave some; so does this."""
    layout = told.spread.mesh.layout
    minds = (layout.replicated or (layout.copies > 1 and layout.dp_shard > 1)) and told.spread.stages is None
    found = (layout.replicated and layout.static_graph) or told.spread.find_unused
    if told.passes.unreached and minds and not found:
        told.spread.expect_unused()
        again()


def _for_rehearsal(world: World, config: Config) -> Layout:
    """The layout as it is on its own devices, for tensors that are on a processor's."""
    layout = world.layout
    if world.on_cuda and layout.gather is None and config.train.precision in ("bfloat16", "float8"):
        layout = replace(layout, gather="bfloat16")
    return replace(layout, compile="none")
