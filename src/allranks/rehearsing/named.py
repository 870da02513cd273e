"""A model that is known by name, as a Task: the module is made from the table that its profile is made from."""

from typing import Any, ClassVar, final

import torch
from torch import nn

from allranks.errors import ConfigError
from allranks.losses import cross_entropy
from allranks.model_shape import ModelShape
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer
from allranks.named_models import find_model
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
        name: as `named_models` has it.
        seq: positions of a sample; 0: the model's own.
        chunk: positions whose logits are held at once; 0: all.
        layers: blocks; 0: the model's own.
    """

    defaults: ClassVar[dict[str, object]] = {"train.precision": "bfloat16", "train.max_norm": 1.0, "train.steps": 8}

    name: str = "llama3-8b"
    seq: int = 0
    chunk: int = 0
    layers: int = 0

    def shape(self) -> ModelShape:
        """The sizes, with the changes that the settings ask for."""
        changes = {key: value for key in ("seq", "layers") if (value := getattr(self, key))}
        return find_model(self.name, **changes)

    def model(self) -> nn.Module:
        """Its module; ConfigError for a kind of model that has none here."""
        shape = self.shape()
        wants = shape.gated and shape.positions == "rotary" and not shape.bias and not shape.dropout
        plain = wants and shape.causal and not shape.kv_rank and not shape.head_dim
        if not plain or shape.shared_ffn or shape.dense_layers or shape.every > 1:
            raise ConfigError(
                f"{shape.name} can be planned and not rehearsed: its module (learned positions, biases or latent "
                "attention) is not among allranks.models; give a Task with your own module"
            )
        sizes: dict[str, Any] = {
            "vocab_size": shape.vocab,
            "num_layers": shape.layers,
            "hidden": shape.hidden,
            "num_heads": shape.heads,
            "num_kv_heads": shape.num_kv_heads,
            "max_seq": shape.seq,
            "tied": shape.tied,
        }
        if shape.experts:
            width = shape.expert_ffn or shape.ffn
            return MoETransformer(**sizes, num_experts=shape.experts, top_k=shape.top_k, ffn=width)
        return Transformer(**sizes, ffn=shape.ffn, chunk=self.chunk or None)

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
        kind = MoETransformer if self.shape().experts else Transformer
        plan: Any = kind.tensor_plan
        return Hints(blocks=("layers.*",), tensor=plan, loss_parallel=not self.chunk)
