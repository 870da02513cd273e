"""A model that is known by name, as a Task: the module is made from the table that its profile is made from."""

from typing import Any, ClassVar, final

import torch
from torch import nn

from allranks.errors import ConfigError
from allranks.losses import cross_entropy
from allranks.model_shape import ModelShape
from allranks.models.gpt import GPT
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.named_models import find_shape
from allranks.plan_request import SIZES
from allranks.task import Hints, Task

SAMPLES = 1 << 40


@final
class Tokens:
    """Samples that are all alike: (tokens, the tokens that follow), zeros of int64 [seq]."""

    draws = False

    def __init__(self, seq: int) -> None:
        self._one = torch.zeros(seq, dtype=torch.int64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self._one, "y": self._one}


@final
class Named(Task):
    """A decoder by its sizes, trained on tokens.

    Attributes:
        name: as `named_models` has it, or the path of a Hugging Face config.json; empty for sizes alone.
        seq: positions of a sample; 0: the model's own.
        chunk: positions whose logits are held at once; 0: all.
        layers, hidden, heads, kv_heads, ffn, vocab, experts, top_k: as in ModelShape; 0: the model's own.
    """

    defaults: ClassVar[dict[str, object]] = {"train.precision": "bfloat16", "train.max_norm": 1.0, "train.steps": 8}

    name: str = "llama3-8b"
    seq: int = 0
    chunk: int = 0
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    experts: int = 0
    top_k: int = 0

    def shape(self) -> ModelShape:
        """The sizes, with the changes that the settings ask for."""
        return find_shape(self.name, **{key: value for key in ("seq", *SIZES) if (value := getattr(self, key))})

    def model(self) -> nn.Module:
        """Its module; ConfigError for a kind of model that has none here, and for a negative chunk."""
        if self.chunk < 0:
            raise ConfigError(f"task.chunk={self.chunk}, but it has to be at least 1 position, or 0 for all at once")
        shape = self.shape()
        kind = _kind(shape)
        sizes: dict[str, Any] = {
            "vocab_size": shape.vocab,
            "num_layers": shape.layers,
            "hidden": shape.hidden,
            "num_heads": shape.heads,
            "max_seq": shape.seq,
            "tied": shape.tied,
            "chunk": self.chunk or None,
        }
        if kind is GPT:
            return GPT(**sizes, ffn=shape.ffn)
        sizes |= {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.dim}
        if kind is MoETransformer:
            width = shape.expert_ffn or shape.ffn
            return MoETransformer(**sizes, num_experts=shape.experts, top_k=shape.top_k, ffn=width)
        return Transformer(**sizes, ffn=shape.ffn)

    def dataset(self, split: str) -> Any:
        """Tokens without meaning."""
        return Tokens(self.shape().seq) if split == "train" else None

    def inputs(self, batch: Any) -> Any:
        """Tokens, and where the loss comes in chunks what follows them."""
        return {"tokens": batch["tokens"], **({"targets": batch["y"]} if self.chunk else {})}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The sum over all positions."""
        return output.sum() if self.chunk else cross_entropy(output, batch["y"])

    def hints(self) -> Hints:
        """The reference models say how they are cut."""
        plan: Any = _kind(self.shape()).tensor_plan
        return Hints(blocks=("layers.*",), tensor=plan, loss_parallel=not self.chunk)


def _kind(shape: ModelShape) -> type[GPT | MoETransformer | Transformer]:
    """The class of allranks.models that has this shape. Raises ConfigError where none has."""
    plain = shape.causal and not (shape.dropout or shape.kv_rank)
    plain = plain and not shape.shared_ffn and not shape.dense_layers and shape.every == 1
    if plain and shape.gated and shape.positions == "rotary" and not shape.bias and not shape.dim % 2:
        return MoETransformer if shape.experts else Transformer
    first = not shape.gated and shape.positions == "learned" and shape.bias  # as GPT-2's
    own = shape.num_kv_heads == shape.heads and shape.dim * shape.heads == shape.hidden
    if plain and first and own:
        if shape.experts:
            raise ConfigError(
                f"{shape.name} can be planned and not rehearsed: no module of allranks.models is a GPT-2 with experts; "
                "give your sizes to mixtral-8x7b, or a Task with your own module"
            )
        return GPT
    raise ConfigError(
        f"{shape.name} can be planned and not rehearsed: no module of allranks.models has its shape, which is neither "
        "Llama's or Mixtral's (rotary positions in heads of an even width, a gated feed-forward or experts, no biases) "
        "nor GPT-2's; give a Task with your own module"
    )
