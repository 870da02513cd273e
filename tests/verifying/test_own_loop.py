"""One process of an own loop: what is recorded of its start, its steps, its resume and its evaluation."""

import threading
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import TaskError
from allranks.verifying.observer import Observer
from allranks.verifying.own_loop import OwnLoop, Setting, number
from allranks.verifying.program import Program, cast_floats, shuffled

DATA = [(torch.arange(12.0).reshape(4, 3) / 7 + step, torch.tensor([0, 1, 0, 1])) for step in range(4)]


def build(distributed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: Any, optimizer: Any, batches: Any) -> float:
    optimizer.zero_grad()
    (x, y), *_ = batches
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return float(loss.detach())


def save(model: Any, optimizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.kept = {name: value.clone() for name, value in model.state_dict().items()}
    SAVED[str(folder)] = (model.kept, deepcopy(optimizer.state_dict()))


def load(model: Any, optimizer: Any, folder: Path) -> None:
    kept, state = SAVED[str(folder)]
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)


SAVED: dict[str, Any] = {}


def run(program: Program, **changes: Any) -> Any:
    observer = Observer()
    with observer.watching():
        return OwnLoop(program, Setting(4, **changes), 0, 1, False, observer).run()


def test_a_run_is_recorded_in_float64(tmp_path: Path) -> None:
    record = run(Program(build, step, DATA))
    assert record.error == "" and len(record.steps) == 4
    first = record.steps[0]
    assert set(first.raw) == set(first.gradients) == set(first.parameters) == set(record.start.parameters)
    assert all(part.value.dtype == torch.float64 for part in first.parameters.values())
    assert first.norm > 0.05 and first.updates == 1 and first.settings[0]["lr"] == 0.1
    assert len(first.rows) == 4 and len(first.draws) == 1 and first.loss > 0
    assert "momentum_buffer.0.weight" in first.state
    clipped = torch.cat([part.value.flatten() for part in first.gradients.values()]).norm()
    assert float(clipped) == pytest.approx(0.05, rel=1e-4)
    assert record.start.unlinked == [] and record.start.optimizers == ["SGD"]


def test_a_resume_goes_on_from_the_middle_and_from_there_once_more(tmp_path: Path) -> None:
    record = run(Program(build, step, DATA, save=save, load=load), folder=str(tmp_path / "x"))
    first = record.resumed
    assert first is not None and record.saved_before == first.first == 2 and len(first.steps) == 2
    second = first.resumed
    assert second is not None and first.saved_before == second.first == 3 and len(second.steps) == 1
    assert second.resumed is None and record.last_saved is first
    for name, part in record.steps[3].parameters.items():
        assert torch.equal(part.value, first.steps[1].parameters[name].value)
        assert torch.equal(part.value, second.steps[0].parameters[name].value)


@pytest.mark.parametrize(("num_steps", "num_loads"), [(2, 0), (3, 1), (4, 2)])
def test_a_save_behind_which_the_data_ends_is_not_loaded(num_steps: int, num_loads: int, tmp_path: Path) -> None:
    """Four steps are asked for."""
    record = run(Program(build, step, DATA[:num_steps], save=save, load=load), folder=str(tmp_path / "x"))
    assert record.error == "" and len(record.steps) == num_steps
    loads = [run for run in (record.resumed, record.resumed and record.resumed.resumed) if run is not None]
    assert len(loads) == num_loads and all(run.steps for run in loads)


def test_the_next_save_waits_until_every_rank_has_loaded_the_last_one(tmp_path: Path) -> None:
    late, found = tmp_path / "x-2-loaded-by-1", list[bool]()

    def loaded(model: Any, optimizer: Any, folder: Path) -> None:
        load(model, optimizer, folder)
        threading.Timer(0.5, late.touch).start()

    def saved(model: Any, optimizer: Any, folder: Path) -> None:
        found.append(late.exists())
        save(model, optimizer, folder)

    program, observer = Program(build, step, DATA, save=saved, load=loaded), Observer()
    with observer.watching():
        record = OwnLoop(program, Setting(4, folder=str(tmp_path / "x")), 0, 2, True, observer).run()
    assert record.error == "" and found == [False, True]


def test_evaluation_and_what_is_kept() -> None:
    program = Program(
        build,
        step,
        DATA,
        evaluate=lambda model, batches: {"rows": sum(len(batch) for batch in batches)},
        validation=torch.ones(5, 3),
        state=lambda model, optimizer: {"number": 3},
    )
    record = run(program)
    assert record.evaluation == {"rows": 5.0} and len(record.evaluated) == 5
    assert float(record.steps[0].kept["number"].value) == 3.0


def test_a_process_that_leaves_what_is_reported_to_the_others_is_no_error() -> None:
    record = run(Program(build, step, DATA, evaluate=lambda *_: None, state=lambda *_: None))  # type: ignore[arg-type]
    assert record.error == "" and record.evaluation == {} and record.steps[0].kept == {} and record.keeps


def test_functions_that_return_something_else_end_it() -> None:
    """With one line, and not as what the program did."""
    with pytest.raises(TaskError, match="evaluate returns a float"):
        run(Program(build, step, DATA, evaluate=lambda *_: 0.5))  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="build returns a Linear"):
        run(Program(lambda distributed: nn.Linear(1, 1), step, DATA))  # type: ignore[arg-type, return-value]


def test_an_error_is_part_of_the_record() -> None:
    def wrong(model: Any, optimizer: Any, batches: Any) -> None:
        raise ValueError("no")

    assert run(Program(build, wrong, DATA)).error.endswith("ValueError: no")


def test_variants_differ_by_rounding_alone() -> None:
    plain, moved = run(Program(build, step, DATA)), run(Program(build, step, DATA), shake=1, shuffled=True)
    for name, part in plain.steps[0].raw.items():
        apart = (part.value - moved.steps[0].raw[name].value).abs().max()
        assert 0 < float(apart) < 1e-13


def test_small_conversions() -> None:
    assert number(torch.tensor([2.0])) == 2.0 and number((3.0, 1)) == 3.0 and number({"loss": 4}) == 4.0
    assert number(torch.ones(2)) is None and number("text") is None
    assert cast_floats((torch.ones(1), torch.tensor([1])), torch.float64)[1].dtype == torch.int64
    x, y = shuffled((torch.arange(9), torch.arange(9)), 3)
    assert torch.equal(x, y) and not torch.equal(x, torch.arange(9)) and torch.equal(x.sort().values, torch.arange(9))
    assert shuffled((torch.arange(2), torch.arange(3)), 0)[1].tolist() == [0, 1, 2]


def noisy(model: Any, optimizer: Any, batches: Any) -> float:
    return step(model, optimizer, [(x + torch.randn(x.shape), y) for x, y in batches])


def test_noise_goes_with_its_sample_when_samples_are_shuffled() -> None:
    """Else another order of samples would move gradients by the noise, and as much would be allowed as rounding."""
    plain, moved = run(Program(build, noisy, DATA)), run(Program(build, noisy, DATA), shuffled=True)
    for name, part in plain.steps[0].raw.items():
        assert torch.allclose(part.value, moved.steps[0].raw[name].value, rtol=1e-12, atol=1e-14), name
    assert plain.steps[0].rows == moved.steps[0].rows


def test_permutations_that_are_drawn_again_are_noted_for_each_run_of_the_data_alone(tmp_path: Path) -> None:
    def shuffled_by(seeds: list[int], rank: int, size: int, first: int = 0) -> Any:
        steps: list[Any] = []
        for seed in seeds:
            order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
            steps += [[(torch.arange(24.0).reshape(8, 3)[some], some % 2)] for some in order.split(4)]
        return steps[first:]

    def record(seeds: list[int]) -> Any:
        def stepping(model: Any, optimizer: Any, batches: Any) -> float:
            torch.randperm(9, generator=torch.Generator().manual_seed(0))  # not for the order of any samples
            return step(model, optimizer, batches)

        program = Program(build, stepping, partial(shuffled_by, seeds), save=save, load=load)
        return run(program, folder=str(tmp_path / str(seeds)))

    right, wrong = record([0, 1]), record([5, 5])
    assert right.redrawn == right.resumed.redrawn == []  # the resume draws them all once more
    assert wrong.redrawn == wrong.resumed.redrawn == [8]
