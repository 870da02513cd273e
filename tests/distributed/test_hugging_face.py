"""Hugging Face models are cut by the plan that they carry themselves, and compute what one device computes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from allranks.task import Task
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of
from tests.distributed.tasks import IGNORED, Words

pytestmark = pytest.mark.distributed

SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
IN_A_LOOP: dict[str, Any] = {"experts_implementation": "eager"}  # a grouped product has no float64 on the CPU
STEPS = 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    # Its embedding multiplies what it looks up, and shares its weight with the last layer.
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=4, pad_token_id=None)),
    # Norms over a head's channels stand between the cut layers.
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=4)),
    # Query, key and value come out of one layer, which is gathered before it is cut in three.
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=None)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, **IN_A_LOOP)
    ),
}


class Causal(Task):
    """The next word, by a model of a family."""

    family: str = "llama"

    def model(self) -> nn.Module:
        return MODELS[self.family]()

    def dataset(self, split: str) -> Any:
        return Words()

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch["x"], "use_cache": False}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.logits.flatten(0, -2), batch["y"].flatten(), reduction="sum")


@final
class Unrounded(TorchFunctionMode):
    """What a model casts to float32 stays float64: the last bit of a float64 would decide how its norms round."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if casts and args[0].dtype == torch.float64:
            return args[0]
        if func is functional.softmax and args[0].dtype == torch.float64:
            kwargs = {**(kwargs or {}), "dtype": None}
        return func(*args, **(kwargs or {}))


def record(family: str, layout: str, global_batch: int = 7) -> list[RecordedStep]:
    """In a worker: the steps."""
    optimizer = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
    config = config_of(layout, f"train.global_batch={global_batch}", *optimizer, steps=STEPS)
    with Unrounded():
        return record_run(Causal(family=family), config, processes_of(config), STEPS)


def reference(task: Task, ranks: Sequence[Sequence[RecordedStep]], data_ranks: Sequence[int]) -> Any:
    dataset, batches = task.dataset("train"), []
    for step in range(STEPS):
        batch = default_collate([dataset[sample] for sample in fed(ranks, step, data_ranks).values()])
        batches.append((batch, int((batch["y"] != IGNORED).sum())))
    model = initial_model(task).double()
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    with Unrounded():
        return plain_loop(model, optimizer, batches, lambda m, batch: task.loss(m(**task.inputs(batch)), batch))


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("layout", "world_size"), [("tp=2", 2), ("tp=2,dp_shard=2", 4)])
def test_their_own_plan_cuts_them(pool: Pools, family: str, layout: str, world_size: int) -> None:
    ranks = pool(world_size).run(record, family, layout)
    expected = reference(Causal(family=family), ranks, range(0, world_size, 2))
    assert not compare(ranks, expected)
    name = "model.layers.1.self_attn.k_proj.weight"
    box, _ = ranks[1][0].gradients[name]
    assert (box.offset, box.shape) == ((4, 0), (4, 16)) if world_size == 2 else box.offset[0] in (0, 2, 4, 6)


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", ["gemma2", "phi3", "mixtral"])
@pytest.mark.parametrize(
    ("layout", "world_size"), [("tp=2", 2), pytest.param("tp=2,dp_shard=2", 4, marks=pytest.mark.full)]
)
def test_a_plan_that_says_less(pool: Pools, family: str, layout: str, world_size: int) -> None:
    """Of an embedding that computes in its own way, of layers with a whole input, and of experts, which stay whole."""
    ranks = pool(world_size).run(record, family, layout)
    assert not compare(ranks, reference(Causal(family=family), ranks, range(0, world_size, 2)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "world_size"), [("cp=2", 2), ("tp=2,cp=2", 4)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_they_compute_with_the_positions_of_a_process(pool: Pools, family: str, layout: str, world_size: int) -> None:
    ranks = pool(world_size).run(record, family, layout)
    assert not compare(ranks, reference(Causal(family=family), ranks, range(1)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("layout", "world_size", "told"),
    [
        ("pp=2", 2, [0]),
        pytest.param("pp=2,dp_shard=2,tp=2", 8, [0, 2], marks=pytest.mark.full),
    ],
)
def test_their_layers_run_in_stages(
    pool: Pools, family: str, layout: str, world_size: int, told: Sequence[int]
) -> None:
    """Masks and rotary tables, which they make outside of their layers, every stage makes by itself."""
    ranks = pool(world_size).run(record, family, layout, 8)
    assert not compare(ranks, reference(Causal(family=family), ranks, told))
    assert ("lm_head.weight" in ranks[0][0].gradients) is False
    assert "lm_head.weight" in ranks[-1][0].gradients
