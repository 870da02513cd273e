"""Profiles of whole Tasks against a plain torch loop on real tensors."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from allranks.errors import TaskError
from allranks.model_profile import ModelProfile
from allranks.profiling.cache import ProfileCache, with_digest
from allranks.stepping.profile import trace_measured, trace_module, trace_task
from allranks.stepping.profiled_step import record
from allranks.task import Hints, Task, load_task
from allranks.verdict import Decision
from tests.profiling.reality import look
from tests.profiling.subjects import CLASSES, SEQ, VOCAB, WIDTH, Adversaries, Images, Vectors, Words, mlp

ROOT = Path(__file__).parents[2]
SUBJECTS: dict[str, Callable[[], Task]] = {
    "transformer": Words,
    "tied, grouped queries": lambda: Words(make="tied"),
    "mixture of experts": lambda: Words(make="moe"),
    "torch's encoder": lambda: Words(make="encoder"),
    "encoder with dropout": lambda: Words(make="dropout"),
    "convolutions with BatchNorm": Images,
    "mlp": Vectors,
    "mlp with dropout": lambda: Vectors(make="dropout"),
    "frozen layers": lambda: Vectors(make="frozen"),
    "own step": Adversaries,
}
FIVE = 5  # samples; profiles are made from two and three


def kept(profile: ModelProfile, num_samples: int) -> float:
    """What the backward of so many samples needs, as the profile says."""
    activations = sum(block.saved_bytes * block.count for block in profile.blocks) * num_samples
    return activations + profile.facts["saved_constant_bytes"] + profile.facts["weight_copy_bytes"]


@pytest.mark.sample(6)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_trace_says_what_a_real_step_keeps_and_computes(name: str, precision: str) -> None:
    task = SUBJECTS[name]()
    profile, real = trace_task(task, precision), look(task, FIVE, precision)
    assert kept(profile, FIVE) == real.saved_bytes
    with sdpa_kernel(SDPBackend.MATH):  # torch counts attention in parts there, and not at all where it is one kernel
        in_parts = look(task, FIVE, precision)
    # torch does not count products of groups: 2 layers, 3 of them each, 2 experts a token, 16 features in and out.
    experts = 2 * 3 * 2 * (2 * SEQ) * 16 * 16 if name == "mixture of experts" else 0
    assert (profile.flops - experts) * FIVE == pytest.approx(in_parts.forward_flops)
    # One kernel computes the scores again in its backward: five products instead of four.
    again = sum(o.flops * b.count for b in profile.blocks for o in b.operations if o.kind == "attention") / 2
    assert (profile.facts["backward_flops"] - again - 2 * experts) * FIVE == pytest.approx(in_parts.backward_flops)
    assert profile.parameters == num_parameters(task)


def test_the_blocks_are_those_that_parallelize_finds() -> None:
    profile = trace_task(Words())
    assert [(block.name, block.count, block.repeated) for block in profile.blocks] == [
        ("embedding", 1, False),
        ("layers.*", 3, True),
        ("norm", 1, False),
        ("output", 1, False),
        ("loss", 1, False),
    ]
    layer = profile.blocks[1]
    assert layer.input_bytes == SEQ * WIDTH * 4  # the residual stream, in float32
    assert layer.parameters == 4 * WIDTH * WIDTH + 3 * WIDTH * 40 + 2 * WIDTH
    alone = sum(o.saved_bytes for o in layer.operations if o.name.startswith("attention."))
    assert alone == SEQ * WIDTH * 2 * 4  # autocast's own copy of the norm's output for each, and what `out` reads
    cuts = {o.name: o.cut for o in layer.operations if o.kind == "matmul"}
    assert cuts == {
        **dict.fromkeys(("attention.query", "attention.key", "attention.value"), "column"),
        **{"attention.out": "row", "feed_forward.gate": "column", "feed_forward.up": "column"},
        "feed_forward.down": "row",
    }


def test_what_a_profile_says_of_the_whole_model() -> None:
    profile = trace_task(Words(make="tied"))
    assert (profile.tokens, profile.seq, profile.heads, profile.kv_heads, profile.vocab) == (SEQ, SEQ, 4, 2, VOCAB)
    assert profile.tied == (("output.weight", "embedding.weight"),)
    assert profile.tensor_parallel
    assert profile.context_parallel
    assert not profile.stateful
    assert (profile.precision, profile.source, profile.name) == ("bfloat16", "traced", "Words")
    assert trace_task(Words(make="moe")).experts == 4
    assert trace_task(Images()).stateful == ("blocks.0.1", "blocks.1.1")


def test_a_longer_sequence_is_another_trace() -> None:
    """Attention grows with the square, the rest in proportion."""
    short, long = trace_task(Words()), trace_task(Words(seq=2 * SEQ))
    for before, after in zip(short.blocks[1].operations, long.blocks[1].operations, strict=True):
        assert after.flops == before.flops * (4 if before.kind == "attention" else 2)
        assert after.saved_bytes == 2 * before.saved_bytes
    assert long.seq == 2 * SEQ


def test_a_gpus_step_is_another() -> None:
    """A layer of torch's encoder keeps three masks of a byte a cell, two norms in float32, and no scores."""
    ours, gpus = trace_task(Words(make="dropout")), trace_task(Words(make="dropout"), device="cuda")
    assert gpus.parameters == ours.parameters
    (attention,) = {o for b in gpus.blocks for o in b.operations if o.kind == "attention"}
    assert (attention.shape, gpus.seq, gpus.heads) == ((SEQ, SEQ, 4, 4, WIDTH // 4), SEQ, 4)
    layer, rows = next(block for block in gpus.blocks if block.repeated), 2 * SEQ * WIDTH
    products = 4 * rows + rows + rows + 2 * 2 * SEQ * 40  # of attention, its output, the first and the second layer
    masks, norms, attention_rows = SEQ * (WIDTH + 40 + WIDTH), 2 * (2 * rows + 8 * SEQ), 4 * SEQ * 4
    assert layer.saved_bytes == products + masks + norms + attention_rows
    assert ours.seq == 0  # in parts on a processor: no kernel of attention


@pytest.mark.parametrize("make", ["mlp", "frozen"])
def test_real_steps_give_the_same_profile(make: str) -> None:
    traced, measured = trace_task(Vectors(make=make)), trace_measured(Vectors(make=make))
    assert measured.source == "measured"
    assert with_digest(replace(measured, source="traced")) == traced


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("item", "aten._local_scalar_dense (`.item()`, or a branch on a tensor) needs values"),
        ("branch", "aten._local_scalar_dense (`.item()`, or a branch on a tensor) needs values"),
        ("shape", "needs values, and a trace has none"),
        ("numpy", "it leaves torch for numpy"),
    ],
)
def test_what_needs_values_is_named_and_can_be_measured(how: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        trace_task(Vectors(make=how))
    message = str(caught.value)
    assert message.startswith("Vectors cannot be traced: ")
    assert said in message
    assert "in inner, subjects.py:" in message
    assert message.endswith("`allranks plan --measured` takes its profile from real steps on this machine instead")
    assert "\n" not in message
    measured = trace_measured(Vectors(make=how))
    assert measured.parameters == num_parameters(Vectors(make=how))
    assert measured.flops == 2 * (WIDTH * WIDTH + WIDTH * CLASSES)


def test_an_operation_without_a_kernel_for_shapes_is_named() -> None:
    with pytest.raises(TaskError, match=r"allranks_test::doubled has no kernel for shapes alone.*register_fake"):
        trace_task(Vectors(make="custom"))
    assert trace_measured(Vectors(make="custom")).parameters == num_parameters(Vectors(make="custom"))


def test_a_model_that_raises_is_the_users_mistake() -> None:
    with pytest.raises(TaskError, match=r"(?s)Broken\.model\(\) raised.*no such layer"):
        trace_task(Broken())


def test_a_measured_step_that_raises_is_the_users_mistake() -> None:
    with pytest.raises(TaskError, match=r"(?s)WithoutLoss's step raised:.*test_profile.py.*no such loss"):
        trace_measured(WithoutLoss())


class WithoutLoss(Vectors):
    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        raise ValueError("no such loss")


class Broken(Vectors):
    def model(self) -> Any:
        raise ValueError("no such layer")


def test_a_module_without_a_task() -> None:
    samples = [(torch.zeros(WIDTH), index % CLASSES) for index in range(3)]
    profile = trace_module(mlp, samples, lambda output, batch: functional.cross_entropy(output, batch[1]))
    assert profile.blocks == trace_task(Vectors()).blocks


def test_a_trace_draws_nothing() -> None:
    before = random.getstate()[1], np.random.get_state(legacy=False), torch.get_rng_state()
    trace_task(Vectors(make="dropout"))
    after = random.getstate()[1], np.random.get_state(legacy=False), torch.get_rng_state()
    assert str(before) == str(after)
    assert torch.equal(before[2], after[2])


USERS = """
from torch import nn
from tests.profiling.subjects import Vectors

class Users(Vectors):
    width: int = 7

    def model(self):
        return nn.Sequential(nn.Linear(24, self.width), nn.ReLU(), nn.Linear(self.width, 5))
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A step that was recorded, for each."""
    found: list[object] = []

    def watched(*given: Any) -> Any:
        found.append(given[-1])
        return record(*given)

    monkeypatch.setattr("allranks.stepping.profile.record", watched)
    return found


def test_a_model_is_read_once(tmp_path: Path, recorded: list[object]) -> None:
    """Another setting, precision or line of the user's file is another model, and so is a broken entry."""
    file = tmp_path / "task_to_cache.py"
    file.write_text(USERS)
    cache = ProfileCache(tmp_path / "profiles")
    task = load_task(str(file))

    def trace(task: Task, precision: str = "bfloat16") -> tuple[ModelProfile, bool]:
        del recorded[:]
        return trace_task(task, precision, cache=cache), bool(recorded)

    first, is_new = trace(task)
    assert is_new
    assert trace(load_task(str(file))) == (first, False)
    assert trace(load_task(str(file), {"width": 8}))[1]
    assert trace(task, "float32")[1]
    trace_task(task, device="cuda", cache=cache)
    assert len(recorded) == 4
    assert trace(task) == (first, False)
    file.write_text(USERS.replace("nn.ReLU()", "nn.Tanh()"))
    assert trace(task)[1]
    for entry in (tmp_path / "profiles").iterdir():
        entry.write_text("{")
    assert trace(task) == (first, True)
    assert trace(task) == (first, False)


def test_a_model_of_no_file_is_read_each_time(tmp_path: Path, recorded: list[object]) -> None:
    told: list[Decision] = []
    made = type("Made", (Vectors,), {"__module__": "no_file_of_a_notebook"})
    for _ in range(2):
        trace_task(made(), cache=ProfileCache(tmp_path), tell=told.append)
    assert len(recorded) == 4
    assert str(told[0]).endswith("not kept for the next time, because part of its code is in no file")
    assert not list(tmp_path.iterdir())


GIANT = """
import resource
from torch import nn
from allranks.profiling.cache import ProfileCache, with_digest
from allranks.stepping.profile import trace_measured, trace_module, trace_task
from tests.profiling.subjects import Vectors

class Giant(Vectors):
    def model(self):
        width = 32768
        return nn.Sequential(nn.Linear(24, width), *(nn.Linear(width, width) for _ in range(8)), nn.Linear(width, 5))

trace_task(Vectors())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
profile = trace_task(Giant())
print(profile.parameters, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.full
def test_a_model_larger_than_the_machine_takes_no_memory() -> None:
    """8.6 thousand million parameters: 34 GB of them, and as much again of gradients."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-c", GIANT]
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300, check=True
    )
    parameters, grown_bytes = map(int, found.stdout.split())
    assert parameters == 24 * 32768 + 32768 + 8 * (32768 * 32768 + 32768) + 32768 * 5 + 5
    assert grown_bytes < 100e6


def num_parameters(task: Task) -> int:
    """Of the real model, tied ones once."""
    built = task.model()
    modules = built.values() if isinstance(built, dict) else [built]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


class Apart(Words):
    """Its logits stay cut until the loss."""

    def hints(self) -> Hints:
        return replace(super().hints(), loss_parallel=True)


@pytest.mark.parametrize(("task", "gathered", "cut"), [(Words, True, ""), (Apart, False, "column")])
def test_logits_are_whole_for_the_loss_unless_it_is_parallel(task: type[Words], gathered: bool, cut: str) -> None:
    operations = [operation for block in trace_task(task()).blocks for operation in block.operations]
    (head,) = [one for one in operations if one.kind == "matmul" and one.cut == "vocab"]
    assert head.gathered is gathered
    assert [one.gathered for one in operations if one is not head] == [False] * (len(operations) - 1)
    losses = [one for one in operations if one.kind == "loss" and one.saved_bytes]
    assert losses and {one.cut for one in losses} == {cut}
