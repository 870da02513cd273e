"""`allranks verify TASK`: right under its layouts; and mistakes in allranks itself are each found."""

import os
from pathlib import Path
from typing import Any

import pytest

from allranks import free_memory
from allranks.errors import ConfigError, LayoutError, ProcessError
from allranks.request import TrainRequest
from allranks.surviving.launch import launch_without_gpus
from allranks.training.counted_parameters import count_parameters
from allranks.verifying import task_verify
from allranks.verifying.answer import Answer
from allranks.verifying.drawn_causes import COMPILED
from allranks.verifying.findings import found
from allranks.verifying.plan import Plan, plan_run
from allranks.verifying.recording import Draw, OneDevice, RunRecord, StepRecord
from allranks.verifying.shrinking import Room, Size
from allranks.verifying.task_ranks import Errand
from allranks.verifying.task_verify import NOT_EVALUATED, hindrance, run_task_alone, verify_task
from tests.commands import POINTS, PROGRAMS
from tests.programs import law_mutants, mutants
from tests.verifying.mistakes import DEEP_BLOCKS, EXPERT_BLOCKS, LAWS, LOAD, OURS, START, UNSEEN, Mistake
from tests.verifying.records import run_of

MUTANTS = str(PROGRAMS / "mutants.py")
TIES = str(PROGRAMS / "near_ties.py")
DEEP = str(PROGRAMS / "stacked.py")
GAN = str(PROGRAMS.parents[1] / "corpus" / "task_gan.py")
EXPERTS = str(PROGRAMS.parents[1] / "corpus" / "task_experts.py")


def verify(task: str, layout: str, *overrides: str) -> Answer:
    return verify_task(TrainRequest(task_spec=task, layout=layout, overrides=overrides, device="cpu"), 4)


@pytest.mark.distributed
def test_a_right_task_is_equal() -> None:
    answer = verify(POINTS, "ddp")
    assert answer.exit_code == 0, str(answer)
    assert "9 samples a step in 3 micro-steps" in str(answer)
    assert NOT_EVALUATED not in answer.notes


@pytest.mark.distributed
def test_functions_that_a_task_has_imported_by_name_are_watched_too(tmp_path: Path) -> None:
    """It was refused as not deterministic: its module has them before anything is replaced.

    Its attention drops in an evaluation as well, which was taken for the last step's (S21).
    """
    (tmp_path / "named.py").write_text(
        f"""import sys
sys.path.insert(0, {str(PROGRAMS)!r})
from torch import nn, rand_like
from torch.nn.functional import dropout, scaled_dot_product_attention
from points import Points
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 2)
    def forward(self, x):
        h = self.first(x + 0.1 * rand_like(x)).unflatten(-1, (4, 2))
        h = scaled_dot_product_attention(h, h, h, dropout_p=0.2)
        return self.last(dropout(h.flatten(-2), 0.1, self.training))
class Named(Points):
    def model(self):
        return Attends()
"""
    )
    answer = verify(f"{tmp_path / 'named.py'}:Named", "ddp")
    assert answer.exit_code == 0, str(answer)
    assert answer.one is not None
    for run, micro_steps in ((answer.one.run, 1), (answer.ranks[0], 3)):
        drawn = [[draw.noise for draw in step.draws] for step in run.steps]
        assert drawn == [[True, False, False] * micro_steps] * 4


@pytest.mark.parametrize(("drawn", "runs"), [(1, [1]), (0, [1, 2])])
def test_numbers_that_were_taken_for_noise_by_chance_are_left_as_they_are(
    drawn: int, runs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides run once more then; not where each draws one for each of its samples."""
    tried = []

    def judged(plan: Plan, num_steps: int, size: Size, *, least_dims: int = 1) -> Answer:
        tried.append(least_dims)
        draw = Draw(1, (4,), False, shared=True)
        one, rank = (RunRecord(steps=[StepRecord(rows=[1, 2, 3, 4], draws=[draw] * often)]) for often in (1, drawn))
        return Answer((found("S16", "off"),), OneDevice(one), [rank])

    monkeypatch.setattr(task_verify, "_verify", judged)
    verify(POINTS, "ddp")
    assert tried == runs


@pytest.mark.distributed
def test_what_was_not_evaluated_and_how_equal_a_low_precision_is_are_told(tmp_path: Path) -> None:
    (tmp_path / "unmeasured.py").write_text(
        f"""import sys
sys.path.insert(0, {str(PROGRAMS)!r})
from points import Points
class Unmeasured(Points):
    def dataset(self, split):
        return super().dataset(split) if split == "train" else None
"""
    )
    answer = verify(f"{tmp_path / 'unmeasured.py'}:Unmeasured", "ddp", "train.precision=bfloat16")
    assert answer.equal and NOT_EVALUATED in answer.notes, str(answer)
    (told,) = [note for note in answer.notes if note.startswith("gradients of the first step in bfloat16: equal to ")]
    error, factor = (float(word.rstrip("%")) for word in told.split() if word.endswith("%"))
    assert 0 < error < 10 and 0 <= factor < 10


@pytest.mark.distributed
def test_a_runs_own_backend_is_not_the_comparisons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[train]\nbackend = "nccl"\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told: list[tuple[int, str]] = []

    def watched(function: Any, *args: Any, nproc: int) -> list[Any]:
        found = launch_without_gpus(lambda: (function(*args), os.environ["CUDA_VISIBLE_DEVICES"]), nproc=nproc)
        told.extend((nproc, seen) for _, seen in found)
        return [value for value, _ in found]

    monkeypatch.setattr(task_verify, "launch_without_gpus", watched)
    request = TrainRequest(task_spec=POINTS, toml=tmp_path / "run.toml", layout="ddp", device="cpu")
    answer = verify_task(request, 2)
    assert answer.equal, str(answer)
    assert set(told) == {(1, ""), (2, "")}


@pytest.mark.full
@pytest.mark.distributed
def test_dropouts_in_compiled_blocks_are_no_hindrance_and_that_they_were_not_compared_is_told(tmp_path: Path) -> None:
    """It could not be verified: the compiler was made to call what notes dropouts."""
    (tmp_path / "compiled.py").write_text(
        f"""import sys
sys.path.insert(0, {str(PROGRAMS)!r})
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from points import Points
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)
    def forward(self, x):
        rows = x[:, None, None, :]
        attended = scaled_dot_product_attention(rows, rows, rows, dropout_p=0.1 if self.training else 0.0)
        return x + self.drop(self.inner(attended[:, 0, 0]).tanh())
class Compiled(Points):
    def model(self):
        return nn.Sequential(nn.Linear(2, 8), Block(), Block(), nn.Linear(8, 2))
"""
    )
    answer = verify(f"{tmp_path / 'compiled.py'}:Compiled", "ddp,compile=block")
    assert answer.exit_code == 0 and COMPILED in answer.notes, str(answer)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("task", "layout", "words"),
    [
        (MUTANTS, "fsdp", ()),
        (MUTANTS, "ddp", ("task.statistics=true",)),
        (POINTS, "tp=2", ()),
        (POINTS, "dp_shard=2,dp_replicate=2", ()),
        (MUTANTS, "ddp", ("train.ema=0.9", "train.precision=bfloat16")),
        (MUTANTS, "fsdp", ("train.precision=float16",)),
        (EXPERTS, "dp_replicate=2,ep=2", ("train.precision=bfloat16",)),
        (EXPERTS, "tp=2", ("train.precision=float16",)),
    ],
)
def test_right_tasks_are_equal(task: str, layout: str, words: tuple[str, ...]) -> None:
    answer = verify(task, layout, *words)
    assert answer.exit_code == 0, str(answer)


def check(mistake: Mistake) -> None:
    """That verify says of a mistake of ours what the list says."""
    task, words = str(PROGRAMS / f"{mistake.program}.py"), (f"task.mutant={mistake.name}", *mistake.words)
    if mistake.kind == START:
        with pytest.raises(LayoutError, match="does not compute what one process computes"):
            verify(task, mistake.layout, *words)
        return
    answer = verify(task, mistake.layout, *words)
    if mistake.kind == LOAD:
        assert answer.exit_code == 3 and "'model.inner.weight'" in str(answer), str(answer)
        return
    assert answer.exit_code == 1, str(answer)
    assert answer.findings[0].verdict.kind == mistake.kind, str(answer)
    if mistake.name in ("a billionth", "two percent"):
        assert answer.findings[0].tensor == "inner.weight", str(answer)


@pytest.mark.distributed
def test_a_mistake_of_our_own_is_found() -> None:
    check(next(mistake for mistake in OURS if mistake.name == "sum for mean"))


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("mistake", OURS, ids=lambda mistake: str(mistake.name))
def test_mistakes_of_our_own_are_found(mistake: Mistake) -> None:
    check(mistake)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("ddp", ("train.micro_batch=1",)),
        ("tp=2", (DEEP_BLOCKS,)),
        ("pp=2", (DEEP_BLOCKS,)),
        ("dp_replicate=2,ep=2", (EXPERT_BLOCKS,)),
    ],
)
def test_what_they_are_made_in_is_right(layout: str, words: tuple[str, ...]) -> None:
    answer = verify(str(PROGRAMS / "law_mutants.py"), layout, *words)
    assert answer.exit_code == 0, str(answer)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "words", "kind", "axis", "factor"),
    [
        ("dp_replicate=2,dp_shard=2", ("task.mutant=sum for mean",), "S9", "dp_replicate*dp_shard", "data ranks = 4"),
        ("dp_shard=2,tp=2", ("task.mutant=norms of a part, in steps", DEEP_BLOCKS), "S15", "tp", ""),
    ],
)
def test_axis_and_factor_of_a_mistake_under_two_axes(
    layout: str, words: tuple[str, ...], kind: str, axis: str, factor: str
) -> None:
    answer = verify(str(PROGRAMS / "law_mutants.py"), layout, *words)
    found = answer.findings[0]
    assert (found.verdict.kind, found.axis, found.factor) == (kind, axis, factor), str(answer)
    assert "beside that" in str(answer) and "first step" not in str(answer)


def test_every_mistake_is_in_the_list() -> None:
    listed = {(mistake.program, mistake.name) for mistake in OURS}
    made = {("mutants", name) for name in mutants.MISTAKES} | {("law_mutants", name) for name in law_mutants.MISTAKES}
    assert listed == made
    assert {mistake.law for mistake in OURS} | UNSEEN.keys() == LAWS.keys() == set(range(1, 16))


@pytest.mark.full
@pytest.mark.distributed
def test_near_ties_of_a_router_hide_nothing_and_accuse_nobody() -> None:
    answer = verify(TIES, "ddp", "train.precision=bfloat16")
    assert answer.exit_code == 0 and "near-ties of its routing were decided as on one device" in str(answer), str(
        answer
    )
    answer = verify(TIES, "ddp", "train.precision=float16", "task.mutant=true")
    assert answer.exit_code == 1 and answer.findings[0].tensor == "2.weight", str(answer)


SMALL = "train.global_batch=9"
NOISY = """
import os, random
import numpy as np, torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
import allranks

class Part(IterableDataset):
    order = "sharded"
    def __iter__(self):
        return iter([(torch.ones(2), torch.ones(1))])

class Noisy(allranks.Task):
    noise: str = "python"
    scale: float = 1.0
    def dataset(self, split):
        x = torch.arange(40.0).view(20, 2) / 40 + 0 * torch.randn(20, 2)
        return Part() if self.noise == "sharded" else TensorDataset(x, x[:, :1])
    def model(self):
        return nn.Linear(2, 1)
    def loss(self, output, batch):
        noise = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()), "": float,
                 "system": lambda: int.from_bytes(os.urandom(6), "big") / 2**48,
                 "own": lambda: np.random.default_rng().random()}
        return ((output - batch[1]) ** 2).sum() * (1 + self.scale * noise[self.noise]())
"""


@pytest.mark.parametrize(
    ("noise", "told", "runs"),
    [
        ("python", "it draws random numbers: python's random", "two runs with other seeds differ"),
        ("numpy", "it draws random numbers: numpy.random", "two runs with other seeds differ"),
        # Not what dataset() draws: that is the same each time.
        ("torch", "it draws random numbers: rand", "two runs with other seeds differ"),
        ("system", "no seed reaches what it draws from: os.urandom", "two runs with the same seeds differ"),
        ("own", "no seed reaches what it draws from: numpy.random.default_rng() without a seed",
         "two runs with the same seeds differ"),
        ("", "", ""),
    ],
)  # fmt: skip
def test_a_task_that_draws_is_told_with_whose_numbers_it_draws(
    noise: str, told: str, runs: str, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(NOISY)
    asked = TrainRequest(task_spec=str(tmp_path / "task.py"), layout="ddp", overrides=(f"task.noise={noise}",))
    stopped = hindrance(run_task_alone(Errand(plan_run(asked, 2).request, 2, str(tmp_path / "checkpoints"))))
    if not told:
        assert stopped is None
        return
    assert stopped is not None and stopped.exit_code == 3
    said = f"the Task is not deterministic on one device\n  {told}\n  {runs}: step 0: the gradient of "
    assert said in str(stopped) and "over dp" not in str(stopped)


@pytest.mark.distributed
@pytest.mark.parametrize("scale", [1.0, 0.05, 1e-3])
def test_noise_from_nowhere_ends_a_task_before_its_ranks_are_judged(scale: float, tmp_path: Path) -> None:
    """It was refused for a loss that couples samples, or accused of S17, or called equal."""
    (tmp_path / "task.py").write_text(NOISY)
    answer = verify(str(tmp_path / "task.py"), "ddp", "task.noise=system", f"task.scale={scale}", SMALL)
    assert answer.exit_code == 3 and "the Task is not deterministic on one device" in str(answer), str(answer)


@pytest.mark.distributed
def test_noise_with_a_row_for_each_sample_is_no_hindrance(tmp_path: Path) -> None:
    """One device has a step in one forward, each of the ranks in three: whoever draws, a sample has the same noise."""
    (tmp_path / "task.py").write_text(
        NOISY.replace("(output - batch[1])", "(output + torch.randn_like(output) - batch[1])")
    )
    answer = verify(str(tmp_path / "task.py"), "ddp", "task.noise=", SMALL)
    assert answer.equal and "in 3 micro-steps" in str(answer), str(answer)


def test_too_little_data_and_data_without_an_order_cannot_be_verified(tmp_path: Path) -> None:
    short = run_of([[0, 1]])
    stopped = hindrance(OneDevice(short))
    assert stopped is not None and stopped.exit_code == 3
    assert "the data is too small for two steps\n  it gives 1" in str(stopped)
    answer = verify(POINTS, "ddp", "task.num_points=3", "train.global_batch=8")
    assert answer.exit_code == 3 and str(answer) == (
        "could not be verified: the data is too small for a step\n"
        "  TensorDataset has 3 samples, fewer than train.global_batch(8): set train.global_batch=3 or less, or bring "
        "more data\n  next: the run itself would be refused for it"
    )
    request = TrainRequest(
        task_spec=POINTS, layout="ddp", nproc=4, overrides=("task.num_points=3", "train.global_batch=2"), device="cpu"
    )
    assert str(verify_task(request, 2)) == (
        "could not be verified: the data is too small to be split\n"
        "  TensorDataset has 3 samples; a step that 4 data-parallel ranks share has 5 here\n"
        "  next: give at least 5 samples, or fewer data ranks"
    )
    (tmp_path / "task.py").write_text(NOISY)
    answer = verify(str(tmp_path / "task.py"), "ddp", "task.noise=sharded")
    assert answer.exit_code == 3 and "there is no order to compare" in str(answer), str(answer)


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """So much is left to the container that this process is in."""
    monkeypatch.setattr(free_memory, "_left_to_groups", lambda: [num_bytes])


def test_a_model_that_does_not_fit_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    answer = verify(POINTS, "ddp")
    assert answer.exit_code == 3 and "the model is too large to be verified on this machine" in str(answer)
    assert "1.0 kB are free; no blocks repeat" in str(answer) and "hints().small" in str(answer)


@pytest.mark.full
@pytest.mark.distributed
def test_a_deep_model_is_verified_without_its_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    request = TrainRequest(task_spec=DEEP, layout="ddp", overrides=("task.num_layers=12",), device="cpu")
    plan = plan_run(request, 2)
    whole = count_parameters(plan.task)
    free(monkeypatch, Room(plan.layout, plan.nproc, 2, 0).needed(whole) - 1)
    answer = verify_task(request, 2)
    assert answer.exit_code == 0 and "which repeat the blocks before them, are left out" in str(answer), str(answer)
    assert answer.one is not None
    assert sum(part.value.numel() for part in answer.one.run.start.parameters.values()) < whole / 2


def test_what_cannot_run_here_is_refused_with_the_nearest() -> None:
    for words in ("layout.local_sgd=2", "layout.ddp_hook=bfloat16"):
        request = TrainRequest(task_spec=POINTS, layout="ddp", nproc=2, overrides=(words,))
        with pytest.raises(LayoutError, match=f"^{words}: computes something else than one device by design"):
            plan_run(request, 4)
    with pytest.raises(LayoutError, match="--layout dp_shard=2,tp=2"):
        verify(POINTS, "tp=4,dp_shard=4")
    with pytest.raises(ConfigError, match="give at least 2"):
        verify_task(TrainRequest(task_spec=POINTS, layout="ddp"), 1)


MISSING = """
import sys
import torch
import allranks

class Missing(allranks.Task):
    how: str = "open"
    def dataset(self, split):
        if self.how == "open":
            open("no_such_file")
        sys.exit(0)
    def model(self):
        return torch.nn.Linear(4, 1)
    def loss(self, output, batch):
        return output.sum()
"""


@pytest.mark.parametrize(("how", "said"), [("open", "FileNotFoundError"), ("exit", "SystemExit: 0")])
def test_a_dataset_that_raises_is_not_equal_and_does_not_differ(how: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "missing.py").write_text(MISSING)
    answer = verify(str(tmp_path / "missing.py"), "ddp", f"task.how={how}")
    assert answer.exit_code == 3 and not answer.equal
    assert str(answer).startswith("could not be verified: the Task fails on one device\n") and said in str(answer)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "what"),
    [
        (0, "the Task fails on one device"),
        (1, "a rank fails"),
        pytest.param(2, "the run that goes on alone from the ranks' checkpoint fails", marks=pytest.mark.full),
        pytest.param(3, "it fails in bfloat16", marks=pytest.mark.full),
    ],
)
def test_a_process_that_is_lost_leaves_nothing_verified(
    before: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill, or sys.exit in the user's loss; `before`: how many launches come to their end."""
    left = iter(range(before))

    def launch(*args: Any, nproc: int) -> list[Any]:
        if next(left, None) is None:
            raise ProcessError("rank 0 was killed by SIGKILL")
        return launch_without_gpus(*args, nproc=nproc)

    monkeypatch.setattr(task_verify, "launch_without_gpus", launch)
    monkeypatch.setattr("allranks.verifying.lowered.launch_without_gpus", launch)
    answer = verify(POINTS, "ddp", "train.precision=bfloat16")
    assert answer.exit_code == 3 and str(answer).startswith(f"could not be verified: {what}\n  rank 0 was killed")
