"""What happens around the user's own lines: boundaries, ends, stops, checkpoints and what is told of them."""

import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import allranks
from allranks import task_world
from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.data.random_keys import seed_all
from allranks.errors import CheckpointError, TaskError
from allranks.run import Run
from allranks.training.snapshot import Contents
from tests.checkpointing.worlds import counted_reads
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, everything, loss_of, refusal, sgd


def prepared(world: Any, resume: bool = True, **cutting: Any) -> tuple[nn.Module, Any, Any]:
    """Model, optimizer and stream."""
    torch.manual_seed(1)
    model = world.parallelize(Net())
    optimizer = world.optimizer(model, sgd)
    stream = world.stream(Samples(), **{"global_batch": 10} | cutting)
    if resume:
        world.resume(model, optimizer, stream)
    return model, optimizer, stream


def train_on(world: Any, model: nn.Module, optimizer: Any, batch: Any) -> None:
    world.backward(loss_of(model, batch), targets=count(batch))
    world.step(optimizer)


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in list_checkpoints(folder / "checkpoints"))


def last_event(folder: Path) -> dict[str, Any]:
    return Run.open(folder).events()[-1]


def test_a_loop_that_is_left_goes_on_with_the_next_step(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, leave: bool) -> None:
        with allranks.join(precision="float64", run=folder) as world:
            model, optimizer, stream = prepared(world, micro_batch=2, epochs=2)
            while stream.step < 8:
                for index, batch in enumerate(stream):
                    train_on(world, model, optimizer, batch)
                    if leave and index == 3:  # after one whole step of three, in the middle of the second
                        break

    losses = []
    for leave in (False, True):
        pool(2).run(case, str(tmp_path / str(leave)), leave)
        run = Run.open(tmp_path / str(leave))
        losses.append([(step["step"], step["samples"], step["loss"], step["ledger"]) for step in run.steps()])
    assert losses[0] == losses[1]
    assert [step for step, *_ in losses[0]] == list(range(1, 9))
    assert saved(tmp_path / "True") == [8]


def test_what_is_saved_of_a_loop_that_is_left_in_a_step_is_the_step_before(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, steps: int) -> tuple[int, dict[str, torch.Tensor]]:
        with allranks.join(precision="float64", run=folder) as world:
            seed_all(1)
            model = world.parallelize(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Samples(), global_batch=10, micro_steps=2, steps=steps)
            world.resume(model, optimizer, stream)
            before = stream.step, everything(world)
            for index, batch in enumerate(stream):
                world.backward(model(batch["x"]).square().sum(), targets=len(batch["x"]))
                if index == 2:  # the first of the second step
                    break
                world.step(optimizer)
            return before

    for name, steps in (("whole", 1), ("left", 3)):
        pool(2).run(case, str(tmp_path / name), steps)
        assert saved(tmp_path / name) == [1]
    whole, found = (pool(2).run(case, str(tmp_path / name), 3) for name in ("whole", "left"))
    for (step, values), (_, expected) in zip(found, whole, strict=True):
        assert step == 1 and values.keys() == expected.keys()
        assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_one_stream_has_one_end(pool: Pools, tmp_path: Path) -> None:
    def case() -> list[str]:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model, optimizer, stream = prepared(world)
            for batch in stream:
                train_on(world, model, optimizer, batch)
            return [
                repr(stream),
                refusal(lambda: iter(stream)),
                refusal(lambda: world.stream(Samples(), global_batch=10)),
                refusal(lambda: world.resume(model, optimizer, stream)),
            ]

    assert pool(1).run(case) == [
        [
            "<Stream at step 4 of 4, sample 37>",
            "TaskError: the stream has ended (epochs=1): give world.stream more, instead of a loop around it",
            "TaskError: world.stream() was called already: a world has one (world.evaluate takes a dataset)",
            "TaskError: world.resume() belongs before the loop, once",
        ]
    ]
    assert saved(tmp_path / "run") == [4]


def test_what_was_not_restored_is_not_saved(pool: Pools, tmp_path: Path) -> None:
    """Another model than the checkpoint's: the loop may be left, or the right model named; nothing is kept of it."""

    def case(fails: bool) -> list[str]:
        found: list[str] = []
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Samples(), global_batch=10, epochs=2)
            if fails:
                with mock.patch.object(Contents, "load", side_effect=CheckpointError("another model")):
                    found += [refusal(lambda: world.resume(model, optimizer, stream))]
                found += [refusal(lambda: world.save(every=1))]
            found += [str(world.resume(model, optimizer, stream))]
            for batch in stream:
                train_on(world, model, optimizer, batch)
                world.save(every=4)
                if stream.step == 4 and not fails:
                    break
        return found

    assert pool(1).run(case, False) == [["0"]]
    (told,) = pool(1).run(case, True)
    assert told[0] == "CheckpointError: another model" and told[1].startswith(
        "TaskError: world.save() before world.resume"
    )
    assert told[2:] == ["4"] and saved(tmp_path / "run") == [4, 8]


class Other(Samples):
    """Of which the samples from 20 on are others."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return item if index < 20 else item | {"x": item["x"] + 1}


@pytest.mark.parametrize(("first", "second"), [(Samples, Samples), (Samples, Other)])
def test_a_resume_says_that_samples_are_not_what_they_were(
    pool: Pools, tmp_path: Path, first: type[Samples], second: type[Samples]
) -> None:
    def case(dataset: type[Samples], epochs: int) -> tuple[int, str]:
        told = io.StringIO()
        with redirect_stderr(told), allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(dataset(), global_batch=10, epochs=epochs)
            before = world.resume(model, optimizer, stream)
            for batch in stream:
                train_on(world, model, optimizer, batch)
            return before, told.getvalue()

    assert [before for before, _ in pool(2).run(case, first, 1)] == [0, 0]
    (before, said), (_, nothing) = pool(2).run(case, second, 2)
    assert before == 4 and "warning" not in nothing, "rank 0 says it, and goes on"
    assert ("] is another sample than when step-00000004 was written, " in said) == (second is Other), said


def test_the_ranks_read_what_they_go_on_from_and_no_save_reads_it_again(pool: Pools, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def case(epochs: int) -> tuple[list[Path], list[Path]]:
        with allranks.join(precision="float64", layout="fsdp", run=str(folder)) as world:
            with counted_reads() as (at_start, _):
                model, optimizer, stream = prepared(world, epochs=epochs)
            with counted_reads() as (later, _):
                for batch in stream:
                    train_on(world, model, optimizer, batch)
                    world.save(every=2)
                    if stream.step == 6:
                        break
        return at_start, later

    pool(2).run(case, 1)
    path = folder / "checkpoints" / "step-00000004"
    assert saved(folder) == [2, 4]
    ranks = pool(2).run(case, 2)
    assert saved(folder) == [4, 6]
    for at_start, later in ranks:
        assert path in {file.parent for file in at_start}
        # What was resumed from stays, as the oldest: its lengths are looked at, once for each save.
        assert sum(file.parent == path for file in later) <= 2, later


def test_a_finished_run_is_not_done_again(pool: Pools, tmp_path: Path) -> None:
    def case() -> tuple[int, int]:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model, optimizer, stream = prepared(world)
            before = stream.step
            for batch in stream:
                train_on(world, model, optimizer, batch)
            return before, stream.step

    assert [pool(1).run(case)[0] for _ in range(2)] == [(0, 4), (4, 4)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_stop_that_one_rank_hears_ends_all_after_the_same_step(
    pool: Pools, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    def case() -> tuple[int, list[int], int]:
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        seen = []
        try:
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                model, optimizer, stream = prepared(world, epochs=3)
                for _ in range(3):  # a loop around it ends as well
                    for batch in stream:
                        seen.append(stream.step)
                        if world.rank == 1 and stream.step == 2:
                            os.kill(os.getpid(), number)
                        train_on(world, model, optimizer, batch)
                reached = stream.step
                os.kill(os.getpid(), number)  # the launcher passes on what the terminal has sent already
        except SystemExit as end:
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
            return reached, seen, int(str(end.code))
        return stream.step, seen, 0

    assert pool(2).run(case) == [(3, [0, 1, 2], code)] * 2
    assert saved(tmp_path / "run") == [3]
    assert last_event(tmp_path / "run")["reason"] == "stopped"


def test_a_request_after_the_last_vote_counts_where_nobody_has_to_agree(pool: Pools, tmp_path: Path) -> None:
    def case(leave: bool) -> tuple[int, int]:
        reached = 0
        try:
            with allranks.join(precision="float64", run=str(tmp_path / str(leave))) as world:
                model, optimizer, stream = prepared(world, steps=2)
                for batch in stream:
                    train_on(world, model, optimizer, batch)
                    reached = stream.step
                    if reached == (1 if leave else 2):
                        os.kill(os.getpid(), signal.SIGTERM)
                    if leave:
                        break
        except SystemExit as end:
            return reached, int(str(end.code))
        return reached, 0

    assert [pool(1).run(case, leave)[0] for leave in (False, True)] == [(2, 75), (1, 75)]
    assert (saved(tmp_path / "False"), saved(tmp_path / "True")) == ([2], [1])


def test_outside_of_the_loop_a_signal_does_what_it_always_does(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        def interrupted() -> None:
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                model, optimizer, stream = prepared(world)
                for batch in stream:
                    train_on(world, model, optimizer, batch)
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the pool's workers ignore it
        try:
            interrupted()
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        finally:
            signal.signal(signal.SIGINT, before)
        return "nothing"

    assert pool(1).run(case) == ["KeyboardInterrupt"]


def test_an_error_saves_nothing_and_is_told(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        def loop() -> None:
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                model, optimizer, stream = prepared(world)
                for batch in stream:
                    train_on(world, model, optimizer, batch)
                    if stream.step == 2:
                        raise ValueError("the user's")

        return refusal(loop)

    assert pool(1).run(case) == ["ValueError: the user's"]
    assert saved(tmp_path / "run") == []
    assert (last_event(tmp_path / "run")["reason"], last_event(tmp_path / "run")["error"]) == (
        "failed",
        "ValueError: the user's",
    )
    assert [step["step"] for step in Run.open(tmp_path / "run").steps()] == [1, 2]
    assert Run.open(tmp_path / "run").holder() is None


def test_a_world_that_an_error_has_ended_surrounds_nothing_more(pool: Pools, tmp_path: Path) -> None:
    """A forward that was under way ends with its world, not when the error is forgotten, inside a later one."""

    def case() -> bool:
        def fail() -> None:
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                for _ in prepared(world)[2]:
                    assert not isinstance(task_world._ROWS.get(), task_world.Alone)
                    raise ValueError("the user's")

        with pytest.raises(ValueError, match="the user's") as told:
            fail()
        alone = isinstance(task_world._ROWS.get(), task_world.Alone)
        del told  # which has held the world until here
        return alone

    assert pool(1).run(case) == [True]


def test_the_journal_has_its_end_whatever_the_leaving_of_the_step_raises(pool: Pools, tmp_path: Path) -> None:
    """After an error of the device, putting buffers back is one more error."""

    def case() -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("the device's")

        raised = pytest.raises(RuntimeError, match="the device's")
        with raised, allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            for _ in prepared(world)[2]:
                loop: Any = world._loop
                loop._step.leave = fail
                raise ValueError("the user's")

    pool(1).run(case)
    assert [e["reason"] for e in Run.open(tmp_path / "run").events() if e["event"] == "end"] == ["failed"]


def test_what_is_saved_and_when(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, first: bool) -> list[str | None]:
        with allranks.join(precision="float64", run=folder, keep=9) as world:
            model, optimizer, stream = prepared(world, micro_batch=2, steps=7)
            found = []
            for batch in stream:
                if first:  # before this step is over: it is kept when it is
                    found.append(world.save(every=3))
                train_on(world, model, optimizer, batch)
                if not first:
                    found.append(world.save(every=3))
            return [None if path is None else path.name for path in found]

    (late,) = pool(1).run(case, str(tmp_path / "late"), False)
    assert [name for name in late if name] == ["step-00000003", "step-00000006"]
    assert [at for at, name in enumerate(late) if name] == [14, 29]  # on the last micro-batch of five
    (early,) = pool(1).run(case, str(tmp_path / "early"), True)
    assert [name for name in early if name] == []
    assert saved(tmp_path / "late") == saved(tmp_path / "early") == [3, 6, 7]
    assert [e["step"] for e in Run.open(tmp_path / "late").events() if e["event"] == "checkpoint"] == [3, 6, 7]


def test_a_step_stands_in_the_journal_before_it_is_saved(pool: Pools, tmp_path: Path) -> None:
    """Else a crash right after the save would lose its line: a resume does not do it again."""

    def case() -> list[tuple[int, int]]:
        found = []
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model, optimizer, stream = prepared(world)
            saver: Any = world._loop and world._loop._saver
            save = saver.save

            def look_and_save(step: int, before_commit: Callable[[], None]) -> Path:
                def look() -> None:
                    before_commit()
                    found.append((step, Run.open(tmp_path / "run").last_step))

                return Path(save(step, look))

            saver.save = look_and_save
            for batch in stream:
                train_on(world, model, optimizer, batch)
                world.save()
        return found

    assert pool(1).run(case) == [[(1, 1), (2, 2), (3, 3), (4, 4)]]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_takes_as_long_as_the_device_does_also_where_the_host_runs_ahead(
    pool: Pools, tmp_path: Path, lag: int
) -> None:
    """As on CUDA, where the host waits for the step before once it has told of the last one."""

    def case() -> None:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model, optimizer, stream = prepared(world)
            loop: Any = world._loop
            loop._lag, is_over = lag, loop._is_over

            def wait(lag: int) -> bool:
                time.sleep(0.2)
                return bool(is_over(lag))

            loop._is_over = wait
            for batch in stream:
                train_on(world, model, optimizer, batch)

    pool(1).run(case)
    first, *others = [step["seconds"] for step in Run.open(tmp_path / "run").steps()]
    assert len(others) == 3 and first < 0.2 and all((seconds > 0.2) == bool(lag) for seconds in others)


def test_numbers_of_the_users_stand_in_the_line_of_their_step(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model, optimizer, stream = prepared(world, micro_batch=5)
            for batch in stream:
                train_on(world, model, optimizer, batch)
                world.save(every=2)
                world.log(loss=1e9, step=77, half=torch.tensor(stream.step / 2), rank=world.rank)
            world.log(accuracy=np.float32(0.5), right=np.int64(3))  # type: ignore[arg-type]
            return refusal(lambda: world.log(name="text"))  # type: ignore[arg-type]

    assert pool(2).run(case)[0] == "TaskError: world.log(name=...): expected a number, not a str"
    run = Run.open(tmp_path / "run")
    assert [(step["step"], step["half"], step["rank"]) for step in run.steps()] == [
        (1, 0.5, 0),
        (2, 1.0, 0),
        (3, 1.5, 0),
        (4, 2.0, 0),
    ]
    assert all(step["loss"] < 100 for step in run.steps())
    (evaluation,) = [event for event in run.events() if event["event"] == "evaluation"]
    assert (evaluation["step"], evaluation["samples"], evaluation["metrics"]) == (
        4,
        37,
        {"accuracy": 0.5, "right": 3.0},
    )


def test_the_journal_tells_what_a_task_s_does(pool: Pools, tmp_path: Path) -> None:
    def case() -> None:
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model, optimizer, stream = prepared(world, resume=False)
            for batch in stream:
                train_on(world, model, optimizer, batch)

    pool(2).run(case)
    run = Run.open(tmp_path / "run")
    starts = [run.events(rank)[0] for rank in (0, 1)]
    assert [(start["event"], start["rank"], start["layout"], start["total_steps"]) for start in starts] == [
        ("start", 0, "dp_replicate=2", 4),
        ("start", 1, "dp_replicate=2", 4),
    ]
    assert set(run.steps()[1]) >= {"t", "step", "samples", "loss", "lr", "grad_norm", "ledger", "seconds"}
    assert run.steps()[1]["tokens"] > 10  # a sample has up to four targets
    assert [e["what"] for e in run.events() if e["event"] == "decision"][:2] == ["device cpu", "backend gloo"]
    assert run.events(1)[-1]["event"] == run.events()[-1]["event"] == "end"
    assert run.steps()[0]["loss"] > 0 and list(run.tensorboard.glob("events.out.tfevents.*"))
    assert saved(tmp_path / "run") == []  # nobody has said what to keep
    assert (run.log(0).exists(), run.log(1).exists()) == (True, True)


def test_data_that_shards_itself_ends_on_all_ranks_together(pool: Pools, tmp_path: Path) -> None:
    class Shard(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        order = "sharded"

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            import torch.distributed as dist

            samples = Samples()
            return (samples[index] for index in range(4 + 6 * dist.get_rank()))

    def case() -> tuple[int, int]:
        real = 0
        with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            stream = world.stream(Shard(), global_batch=4)
            for batch in stream:
                real += world.weight * len(batch["index"])
                train_on(world, model, optimizer, batch)
            return stream.step, real

    assert pool(2).run(case) == [(5, 4), (5, 10)]


def test_resume_comes_before_the_loop_and_with_what_is_this_world_s() -> None:
    with allranks.join(precision="float64") as world:
        world.parallelize(Net())
        with pytest.raises(TaskError, match=r"world.resume\(\) before world.stream"):
            world.resume(nn.Linear(1, 1), None, None)  # type: ignore[arg-type]


def test_resume_takes_the_stream_of_this_world_only(tmp_path: Path) -> None:
    with allranks.join(precision="float64", run=str(tmp_path / "earlier")) as world:
        _, _, earlier = prepared(world, resume=False)
    with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
        model, optimizer, stream = prepared(world, resume=False)
        for other in (earlier, Samples()):
            with pytest.raises(TaskError, match=r"world\.resume\(\): pass the stream that world\.stream"):
                world.resume(model, optimizer, other)  # type: ignore[arg-type]
        assert world.resume(model, optimizer, stream) == 0
