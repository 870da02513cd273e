"""Ranks that enter unequally many units are stopped with their names; ranks that are only slow are waited for."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path as File
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks
from allranks.errors import TaskError
from allranks.parallel import parting
from allranks.parallel.parting import Watch, describe_parting, find_parting
from allranks.run import Run
from allranks.stepping.pace import explain_pace
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Stack, Tiny
from tests.training.own.cases import Samples, built, count, loss_of, refusal, sgd

END = "."


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ((["", "a"], False), (["", "b"], False), ("a", "b")),
        ((["", "a", "b"], False), (["", "a"], False), None),  # slower
        ((["", "a", "b"], False), (["", "a", END], False), ("b", "nothing more")),
        ((["", "a", "b"], False), (["", "a"], True), ("b", "nothing more")),
        ((["a"], True), (["a", ""], False), ("nothing more", "the model")),
        ((["a"], True), (["a"], True), None),
        (([], False), (["a"], False), None),
    ],
)
def test_where_two_ranks_part(
    ours: tuple[list[str], bool], theirs: tuple[list[str], bool], found: tuple[str, str] | None
) -> None:
    assert find_parting({3: ours}, {3: theirs}) == found
    assert find_parting({3: ours}, {4: theirs}) is None, "another step says nothing"
    assert find_parting({2: ([], True), 3: ours}, {2: ([], True), 3: theirs, 4: ([], False)}) == found


def test_the_lower_rank_comes_first() -> None:
    assert describe_parting((2, 0), ("a", "b")).startswith("rank 0 b, rank 2 a. A sharded layout gathers")


@pytest.mark.parametrize(
    ("entered", "why", "remedy"),
    [
        ("the statistics of a", "A synchronised BatchNorm takes its statistics", "say layout.batchnorm=local"),
        ("the experts a", "Under ep all ranks exchange the tokens", "leave ep out"),
        ("a", "A sharded layout gathers", "hints().optional"),
    ],
)
def test_the_reason_and_the_remedy_are_those_of_what_was_mixed(entered: str, why: str, remedy: str) -> None:
    for pair in ((entered, "nothing more"), ("nothing more", entered)):
        told = describe_parting((0, 1), pair)
        assert f". {why}" in told and remedy in told.partition("nothing of this step is saved; ")[2]


class Late:
    """A collective that ends between the last slice and the look at it."""

    def __init__(self, error: str) -> None:
        self.error, self.calls = error, 0

    def wait(self, timeout: Any = None) -> None:
        self.calls += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_what_ends_just_after_a_slice_is_no_failure() -> None:
    work: Any = Late("")
    failed: Any = Late("Connection closed by peer")
    watch: Any = None
    Watch.wait(watch, work)
    assert work.calls == 2
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        Watch.wait(watch, failed)


class Skipping(Stack):
    """Ranks leave out blocks, once they are told to."""

    def __init__(self, skipped: Mapping[int, int], seconds: float) -> None:
        from tests.distributed.tasks import Block, vector_gain

        super().__init__([Block(vector_gain()) for _ in range(3)])
        self.skipped, self.seconds, self.told = skipped, seconds, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.told and self.skipped.get(dist.get_rank()) == index:
                time.sleep(self.seconds)
                if not self.seconds:
                    continue
            hidden = block(hidden)
        found: torch.Tensor = self.last(hidden)
        return found


class SkippingTask(Tiny):
    """By rank the number of the block that it leaves out from the second step on, or, with `seconds`, is slow at."""

    skipped: dict[int, int] = {}
    seconds: float = 0.0

    def model(self) -> nn.Module:
        return Skipping(self.skipped, self.seconds)


def stepped(layout: str, skipped: Mapping[int, int], seconds: float = 0.0) -> tuple[str, int]:
    """What a training is stopped with, after how many steps."""
    task = SkippingTask()
    task.skipped, task.seconds = dict(skipped), seconds
    with patch.object(parting, "SLICE_SECONDS", 0.2):
        session = session_of(task, config_of(layout, "train.global_batch=8", steps=4))
        model = session.spread.bare()
        assert isinstance(model, Skipping)
        done = 0
        try:
            for _ in step_through(session, 4):
                model.told = True
                done += 1
        except Exception as error:
            return f"{type(error).__name__}: {error}", done
        return "", done


SKIPPED = [
    ("fsdp", 2, {1: 2}, "rank 0 blocks.2, rank 1 nothing more."),
    ("fsdp", 2, {0: 0}, "rank 0 blocks.1, rank 1 blocks.0."),
    ("fsdp,sharding=grad_op", 2, {1: 2}, "rank 0 blocks.2, rank 1 nothing more."),
    pytest.param("fsdp", 3, {2: 1}, "rank 2 blocks.2.", marks=pytest.mark.full),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "size", "skipped", "words"), SKIPPED)
def test_ranks_that_enter_unequally_many_units_are_stopped_by_name(
    pool: Pools, layout: str, size: int, skipped: dict[int, int], words: str
) -> None:
    try:
        ranks = pool(size).run(stepped, layout, skipped, timeout=50)
    finally:
        pool(size).close()  # what they still wait for would meet the next case
    told = [text for text, _ in ranks if text.startswith("TaskError: the ranks ran different modules: ")]
    assert len(set(told)) == 1 and words in told[0], ranks
    assert len(told) == size
    assert all(1 <= done <= 2 for _, done in ranks)


@pytest.mark.distributed
@pytest.mark.full
def test_with_copies_the_ranks_of_one_group_say_it(pool: Pools) -> None:
    """Those of the other may wait inside of FSDP2, until these have ended; rank 3 is compared with 2 and with 0."""

    def case() -> None:
        text, _ = stepped("dp_replicate=2,dp_shard=2", {3: 1})
        raise TaskError(text)

    with pytest.raises(TaskError, match=r"rank [02] blocks\.1, rank 3 blocks\.2\."):
        pool(4).run(case, timeout=50)


STAGED = "pp=2,dp_shard=2"


class Ordered(Stack):
    """By rank the order in which it enters its blocks, once it is told to; each stage of two has three of them."""

    def __init__(self, orders: Mapping[int, Sequence[int]], late: bool) -> None:
        from tests.distributed.tasks import Block, vector_gain

        super().__init__([Block(vector_gain()) for _ in range(6)])
        self.orders, self.late, self.told, self.calls = orders, late, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.calls += self.told
        follows = self.told and not (self.late and self.calls % 2)
        for index in self.orders.get(dist.get_rank(), range(6)) if follows else range(6):
            hidden = self.blocks[index](hidden)
        found: torch.Tensor = self.last(hidden)
        return found


class OrderedTask(Tiny):
    """`late`: the orders hold in every second micro-step."""

    orders: dict[int, list[int]] = {}
    late: bool = False

    def model(self) -> nn.Module:
        return Ordered(self.orders, self.late)


def staged(orders: Mapping[int, Sequence[int]], layout: str = STAGED, *, late: bool = False) -> list[str]:
    """After each of three steps, the last two in these orders, what the ranks of a pipeline find to be unlike."""
    task = OrderedTask(late=late)
    task.orders = {rank: list(order) for rank, order in orders.items()}
    found = list[str]()
    with patch.object(parting, "SLICE_SECONDS", 0.2):
        session = session_of(task, config_of(layout, "train.global_batch=8", "train.micro_batch=2", steps=3))
        model = session.spread.bare()
        assert isinstance(model, Ordered)
        for stepped in step_through(session, 3):
            pending, group = stepped.outcome.pending, session.processes.world_group
            explain = partial(explain_pace, pending, stepped.batch.step + 1, group, torch.device("cpu"))
            found.append(refusal(explain) if pending.read().diverged else "")
            model.told = True
    return found


SWAPPED = [
    ({1: [0, 2, 1, 3, 4, 5]}, "rank 0 blocks.1, rank 1 blocks.2. A sharded"),
    ({3: [0, 1, 2, 3, 5, 4]}, "rank 2 blocks.4, rank 3 blocks.5. A sharded"),
]


@pytest.mark.full
@pytest.mark.distributed
def test_a_stage_whose_ranks_enter_equally_many_other_units_is_found(pool: Pools) -> None:
    for orders, words in SWAPPED:
        for told in pool(4).run(staged, orders):
            assert told[0] == ""
            for step in (2, 3):
                begin = f"TaskError: in step {step} the ranks ran different modules: "
                assert told[step - 1].startswith(begin + words), told


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["pp=2,dp_shard=2", pytest.param("dp_replicate=2,pp=2", marks=pytest.mark.full)])
def test_stages_that_enter_units_of_their_own_have_not_parted(pool: Pools, layout: str) -> None:
    assert pool(4).run(staged, {}, layout) == [["", "", ""]] * 4


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("orders", "late", "words"),
    [
        ({1: [0, 2, 3, 4, 5]}, False, r"rank 0 blocks\.1, rank 1 blocks\.2\. A sharded"),
        # In the last forward before all backwards: the rank that has entered less waits for the other stage.
        ({1: [0, 1, 3, 4, 5]}, True, r"rank 0 blocks\.2, rank 1 nothing more\."),
        pytest.param({2: [0, 1, 2, 3, 4]}, False, r"rank 2 nothing more, rank 3 blocks\.5\.", marks=pytest.mark.full),
        pytest.param({0: [0, 1, 3, 4, 5]}, False, r"rank 0 nothing more, rank 1 blocks\.2\.", marks=pytest.mark.full),
    ],
)
def test_a_stage_whose_ranks_enter_unequally_many_units_says_it(
    pool: Pools, orders: dict[int, list[int]], late: bool, words: str
) -> None:
    """Those of the other wait for it, until these have ended."""

    def case() -> None:
        raise TaskError(str(staged(orders, f"{STAGED},schedule=gpipe" if late else STAGED, late=late)))

    with pytest.raises(TaskError, match=f"the ranks ran different modules: {words}"):
        pool(4).run(case, timeout=50)


@pytest.mark.distributed
def test_a_rank_that_is_slow_is_waited_for(pool: Pools) -> None:
    """Three slices long, at the second block: the other one has told what it has entered, and found nothing."""
    assert pool(2).run(stepped, "fsdp", {1: 1}, 0.7) == [("", 4)] * 2


def own_loop(folder: str, skip: bool) -> None:
    with (
        patch.object(parting, "SLICE_SECONDS", 0.2),
        allranks.join(layout="fsdp", precision="float64", run=folder) as world,
    ):
        model = built(7)
        spread = world.parallelize(model)
        optimizer = world.optimizer(spread, sgd)
        stream = world.stream(Samples(), global_batch=10, steps=4)
        world.resume(spread, optimizer, stream)
        entered = list(model.blocks)
        if not skip:
            entered.pop(world.rank)
        elif world.rank:
            entered.pop(1)
        for batch in stream:
            if stream.step == 1:
                model.blocks.forward = lambda x: _through(entered, x)  # type: ignore[method-assign]
            world.backward(loss_of(spread, batch), targets=count(batch))
            world.step(optimizer)
            world.save(every=1)


def _through(blocks: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("skip", "text"),
    [
        (True, "TaskError: the ranks ran different modules: rank 0 blocks.1, rank 1 blocks.2. A sharded layout"),
        (False, "TaskError: in step 2 the ranks ran different modules: rank 0 blocks.1, rank 1 blocks.0. A sharded"),
    ],
)
def test_a_loop_of_ones_own_is_stopped_too(pool: Pools, tmp_path: File, skip: bool, text: str) -> None:
    """Where they enter equally many units, the step ends; what it has mixed is not saved."""
    try:
        for found in pool(2).run(lambda: refusal(lambda: own_loop(str(tmp_path), skip)), timeout=50):
            assert found.startswith(text), found
    finally:
        pool(2).close()
    assert [event["step"] for event in Run.open(tmp_path).events() if event["event"] == "checkpoint"] == [1]
