"""Logits that stay cut over tp until the loss: one device's losses, gradients, metrics; and less memory."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from allranks import losses
from allranks.errors import LayoutError
from allranks.hints import Hints, TensorStyle
from allranks.models.transformer import Transformer
from allranks.task import Task
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, processes_of, session_of
from tests.distributed.tasks import IGNORED, Tiny, Words
from tests.distributed.test_chunked_laws import data_ranks_of

pytestmark = pytest.mark.distributed

STEPS = 3
OVERRIDES = (*SGD[:2], "optimizer.weight_decay=0", "train.global_batch=12", "train.micro_steps=2")
# 11 words: 6 and 5; 4, 4 and 3. Without tp the same line gets whole logits.
LAYOUTS = {
    "ddp": ("ddp", 2),
    "tp": ("tp=2", 2),
    "tp of three": ("tp=3", 3),
    "tp-fsdp": ("tp=2,dp_shard=2", 4),
    "tp-ddp": ("tp=2,dp_replicate=2", 4),
    "tp-pp": ("tp=2,pp=2", 4),
    "tp-cp": ("tp=2,cp=2", 4),
}


class Parallel(Tiny):
    """The reference transformer, or torch's encoder; the loss is allranks' own."""

    kind: str = "transformer"

    def hints(self) -> Hints:
        tensor: dict[str, TensorStyle] = {"*.self_attn": "heads", "words": "vocab", "head": "vocab"}
        return Hints(tensor=tensor if self.kind == "encoder" else {}, loss_parallel=True)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return losses.cross_entropy(output, batch["y"])


def record(layout: str, kind: str) -> tuple[list[RecordedStep], dict[str, float], list[str]]:
    config = config_of(layout, *OVERRIDES, steps=STEPS)
    processes = processes_of(config)
    steps = record_run(Parallel(kind=kind), config, processes, STEPS)
    session = session_of(Parallel(kind=kind), config, processes)
    return steps, validate(session), [f"{said.what}: {said.because}" for said in session.spread.decisions]


CASES = [*((name, "transformer") for name in LAYOUTS), ("tp", "encoder"), ("tp", "moe")]
LONG = [("tp-ddp", "transformer"), ("tp-pp", "transformer"), ("tp-cp", "transformer"), ("tp", "moe")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(*case, marks=[pytest.mark.full] * (case in LONG)) for case in CASES]
)
def test_it_computes_what_one_device_does_with_whole_logits(pool: Pools, name: str, kind: str) -> None:
    layout, size = LAYOUTS[name]
    ranks = pool(size).run(record, layout, kind)
    steps, task = [steps for steps, _, _ in ranks], Parallel(kind=kind)
    dataset, model = task.dataset("train"), initial_model(task).double()
    shares = data_ranks_of(layout, size)
    whole = [default_collate([dataset[s] for s in fed(steps, step, shares).values()]) for step in range(STEPS)]

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")

    everything = default_collate([dataset[index] for index in range(len(dataset))])
    counted = everything["y"] != IGNORED
    model.eval()  # or experts would count these tokens
    with torch.no_grad():
        right = (model(everything["x"]).argmax(-1) == everything["y"])[counted].sum()
        expected = float(loss(model, everything)) / int(counted.sum())
    for _, metrics, said in ranks:
        assert metrics["loss"] == pytest.approx(expected, rel=1e-12)
        assert metrics["accuracy"] == pytest.approx(float(right) / int(counted.sum()), rel=1e-12)
        head = "head" if kind == "encoder" else "output"
        stays = (
            f"the logits of {head} stay cut until the loss; metrics() gets whole ones: hints().loss_parallel says so"
        )
        assert (stays in said) == ("tp" in name)
    model.train()
    work = [(batch, int((batch["y"] != IGNORED).sum())) for batch in whole]

    def update_balance(module: Any) -> None:
        if kind == "moe":
            module.update_balance()

    reference = plain_loop(model, lambda owned: torch.optim.SGD(owned, lr=0.1), work, loss, finish=update_balance)
    assert compare(steps, reference) == []


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(t.nbytes for t in tree_leaves(found) if isinstance(t, torch.Tensor))])
        return found


WORDS, POSITIONS, CHUNK = 1003, 24, 4


class Wide(Task):
    """A vocabulary that outweighs everything else; `how` its loss is computed; no metrics."""

    how: str = "whole"

    def model(self) -> nn.Module:
        return Transformer(WORDS, 1, 8, 4, ffn=8, max_seq=6, chunk=CHUNK if self.how == "chunked" else None)

    def dataset(self, split: str) -> Any:
        return Words()

    def hints(self) -> Hints:
        return Hints(loss_parallel=self.how == "cut")

    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch["x"]} | ({"targets": batch["y"]} if self.how == "chunked" else {})

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return output.sum() if self.how == "chunked" else losses.cross_entropy(output, batch["y"])


def largest(how: str) -> tuple[int, int]:
    """In a worker: bytes of the largest tensor of a forward and backward, and of an evaluation without metrics."""
    importlib.import_module("torch._dynamo")
    task = Wide(how=how)
    session = session_of(task, config_of("tp=2", *OVERRIDES[:2], "train.global_batch=4", precision="float64"))
    batch = default_collate([task.dataset("train")[index] for index in range(4)])
    forward = session.forward
    with Largest() as training:
        task.loss(forward(batch), batch).backward()
    with Largest() as evaluating:
        validate(session)
    return training.bytes, evaluating.bytes


def test_no_rank_holds_whole_logits(pool: Pools) -> None:
    a_float, mine = 8, -(-WORDS // 2)
    found = {how: pool(2).run(largest, how) for how in ("whole", "cut", "chunked")}
    assert found["whole"][0][0] == POSITIONS * (WORDS + 1) * a_float  # gathered with a row of padding
    assert found["cut"][0] == (POSITIONS * mine * a_float, found["cut"][0][1])
    # In chunks the logits of 4 positions are smaller than the 502 rows of 8 channels that a rank has of the embedding.
    assert found["chunked"][0][0] == mine * 8 * a_float
    for how in ("cut", "chunked"):
        assert found[how][0][1] < found["whole"][0][1]


class Twice(Parallel):
    """A loss of the user's own under the hint."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="sum")


class Replicated(Parallel):
    """The hint, and no last layer that is cut."""

    def hints(self) -> Hints:
        return Hints(tensor={"layers.*.feed_forward.up": "colwise"}, loss_parallel=True)


def refused(task: Tiny) -> str:
    with pytest.raises(LayoutError) as caught:
        session_of(task, config_of("tp=2"))
    return str(caught.value)


def test_a_loss_that_takes_them_for_a_tensor_is_told(pool: Pools) -> None:
    messages = pool(2).run(refused, Twice())
    assert messages[1] == (
        ".flatten meets logits of which this process has words 6 to 10 of 11 (tp=2), because hints().loss_parallel "
        "says so: give them to allranks.losses.cross_entropy as they are, or leave that hint out"
    )


def test_without_a_last_layer_that_is_cut_it_is_refused(pool: Pools) -> None:
    for message in pool(2).run(refused, Replicated()):
        assert message.startswith("hints().loss_parallel leaves logits cut, but tp cuts no last layer: layers.0.feed")


class Squared(Parallel):
    """A loss that looks at all positions of a sequence."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return losses.cross_entropy(output, batch["y"], reduction="none").sum(-1).square().sum()


def advised() -> str:
    with pytest.raises(LayoutError) as caught:
        session_of(Squared(), config_of("tp=2,cp=2"))
    return str(caught.value)


def test_cut_logits_count_as_the_whole_output_where_the_start_compares(pool: Pools) -> None:
    for message in pool(4).run(advised):
        assert "so that loss() looks at more than one position" in message
