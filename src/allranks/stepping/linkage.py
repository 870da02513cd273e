"""Do optimizers still hold the parameters that the model computes with? What is not linked is never learnt.

A parameter that somebody replaces while the run goes on (a layer that is made anew, a weight that is assigned) is in no
optimizer, and no gradient of it is reduced: the loss still falls a little, by the other parameters.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from torch.distributed.tensor import DTensor

from allranks.parallel.identity import live_parameters
from allranks.parallel.spread import Spread
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.sentinel import RoundSentinel
from allranks.verdict import Verdict

SHOWN = 8
ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""States of TORCHS that have an element for each of the parameter's; others keep what they like under these names."""
TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@final
class Linkage(RoundSentinel):
    """Is every parameter of the model the one that was spread, and the optimizers' own, with a state of its shape?"""

    name: ClassVar[str] = "linkage"

    def __init__(self, spread: Spread, optimizers: Optimizers) -> None:
        self._spread, self._optimizers = spread, optimizers
        live = self._live()
        self._known = frozenset(live)
        self.watched = tuple(name for name, parameter in live.items() if spread.tensors.get(name) is parameter)

    def tell(self) -> list[str]:
        return [*self._of_model(), *self._of_optimizers()][:SHOWN]

    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        found = [(rank, lines) for rank, lines in enumerate(told) if lines]
        if not found:
            return None
        rank, lines = found[0]
        others = f" (and on {len(found) - 1} more ranks)" if len(found) > 1 else ""
        what = f"step {step}: optimizers and model have parted on rank {rank}{others}: {lines[0]}"
        evidence = tuple(lines[1:]) or ("what is not linked is not learnt, and its gradients are not reduced",)
        remedy = (
            "change values in place (parameter.data.copy_, torch.nn.init), and make all layers before the optimizer"
        )
        return Verdict("optimizer_unlinked", what, evidence, remedy)

    def _live(self) -> dict[str, Any]:
        self._spread.reshard()  # a parameter that is gathered has another tensor in its place
        return live_parameters({which: self._spread.bare(which) for which in self._spread.modules})

    def _of_model(self) -> list[str]:
        live, entries = self._live(), self._spread.map
        there = {id(parameter) for parameter in live.values()}
        found = []
        for name in self.watched:
            if name not in live:
                if id(self._spread.tensors[name]) in there:  # under another name, as pruned and parametrised ones are
                    continue
                found.append(f"the model no longer has the parameter {name}, which is still updated")
            elif live[name] is not self._spread.tensors[name]:
                found.append(f"the model has another tensor for {name} than the one that is updated")
            elif live[name].requires_grad and not entries[name].trainable:
                found.append(f"{name} asks for gradients now, but was frozen at the start: no optimizer has it")
        held = self._optimizers.entries
        added = [
            name
            for name, parameter in live.items()
            if name not in self._known and parameter.requires_grad and id(parameter) not in held
        ]
        return found + [f"the model has a new parameter {name}, which no optimizer has" for name in added]

    def _of_optimizers(self) -> list[str]:
        found, held, entries = list[str](), set[int](), self._optimizers.entries
        for optimizer in self._optimizers.by_name.values():
            kind = type(optimizer).__name__
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                held.add(id(parameter))
                entry = entries.get(id(parameter))
                if entry is None:
                    found.append(f"{kind} holds a tensor of shape {tuple(parameter.shape)} that is no parameter")
                    continue
                states = optimizer.state.get(parameter, {}) if type(optimizer) in TORCHS else {}
                for key, value in states.items():
                    if key in ELEMENTWISE and isinstance(value, torch.Tensor) and _shape(value) != _shape(parameter):
                        shapes = f"{_shape(value)}, and not {_shape(parameter)}"
                        found.append(f"{kind} keeps {key} of {entry.name} in the shape {shapes}")
        return found + [
            f"no optimizer holds {entry.name} any more" for key, entry in entries.items() if key not in held
        ]


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    """Of this rank's part."""
    return tuple((value._local_tensor if isinstance(value, DTensor) else value).shape)
