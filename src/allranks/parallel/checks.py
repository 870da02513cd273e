"""What is asked of the user's modules before they are spread."""

from collections.abc import Mapping

import torch
from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.parallel.mesh import Mesh
from allranks.parallel.precision import Precision
from allranks.parallel.replica_twin import is_fake
from allranks.verdict import Decision


def start_training(which: str, module: nn.Module, decisions: list[Decision]) -> None:
    """Only the whole: a part in evaluation mode inside a model in training mode is meant so, a frozen BatchNorm say."""
    if not module.training and any(p.requires_grad for p in module.parameters()):
        module.train()
        name = f"model {which}" if which else "the model"
        decisions.append(Decision(f"{name} is trained in training mode", "model() returned it in evaluation mode"))


def cast(module: nn.Module, precision: Precision, decisions: list[Decision]) -> None:
    """Floating tensors (complex ones stay) in the precision's own type, said where the model came in another."""
    floating = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if floating <= {precision.parameters}:
        return
    _convert(module, precision.parameters)
    if precision.parameters is torch.float64:
        return
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floating - {precision.parameters}))
    because = f"train.precision={precision.name}; model() made them {names}"
    decisions.append(Decision("parameters are float32", because))


def _convert(module: nn.Module, dtype: torch.dtype) -> None:
    if not is_fake(module):
        module.float() if dtype is torch.float32 else module.double()
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            # Module.float swaps tensors without memory, which torch refuses where anything refers weakly to them.
            tensor.data = tensor.detach().to(dtype)


def check_kinds(module: nn.Module) -> None:
    """Only dense, real gradients of known shapes can be reduced, clipped and cut alike."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise TaskError(
                f"{name} has no shape yet, for it belongs to a lazy module: call the model on a sample before it is "
                "handed over, or say how many features it has"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise TaskError(f"parameter {name} is {kind}: make it real, and use torch.view_as_complex in forward")
    for name, member in module.named_modules():
        if isinstance(member, nn.Embedding | nn.EmbeddingBag) and member.sparse and member.weight.requires_grad:
            raise TaskError(f"{name or 'the model'} has sparse gradients, which no layout here reduces: sparse=False")


def check_tables(module: nn.Module, mesh: Mesh) -> None:
    """No row may depend on which samples a rank has: no sum over ranks is then what one device has.

    Nor may a table be rescaled by one stage of a pipeline, where another one computes with the same weight.
    """
    if mesh.layout.pp > 1:
        _check_tied_tables(module, mesh.layout.pp)
    if mesh.layout.dp * mesh.layout.cp == 1:
        return
    why = {
        "max_norm": "rescales rows in forward, each rank those of its own samples: rescale them after the step",
        "scale_grad_by_freq": "divides by how often a rank's own samples name a row: weigh the samples in loss",
    }
    for name, table in module.named_modules():
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
            continue
        counts = table.scale_grad_by_freq and table.weight.requires_grad
        if table.max_norm is not None or counts:
            key = "scale_grad_by_freq" if counts else "max_norm"
            raise LayoutError(
                f"{name or 'the model'} has {key}, which {why[key]}, or use a layout without data and context parallel"
            )


def _check_tied_tables(module: nn.Module, pp: int) -> None:
    owners: dict[int, str] = {}
    rescaled: dict[int, str] = {}
    for name, member in module.named_modules():
        for parameter in (p for p in member._parameters.values() if p is not None):
            first = owners.setdefault(id(parameter), name)
            if isinstance(member, nn.Embedding | nn.EmbeddingBag) and member.max_norm is not None:
                rescaled[id(parameter)] = name
            if first != name and (table := rescaled.get(id(parameter))) is not None:
                other = first if table == name else name
                raise LayoutError(
                    f"{table} has max_norm, which rescales rows in forward, and shares its weight with {other}, of "
                    f"which another of pp={pp} stages may have a copy of its own: rescale them after the step, untie "
                    "them, or use a layout without pp"
                )


def check_apart(modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Each module is cut by itself: a parameter that two of them share would silently become two."""
    owner: dict[int, str] = {}
    for which, module in modules.items():
        for name, parameter in module.named_parameters():
            other = owner.setdefault(id(parameter), which)
            if other != which:
                raise LayoutError(
                    f"{which}.{name} is shared with model {other!r}, and layout {mesh.layout} cuts each model by "
                    "itself: use --layout ddp or single"
                )
