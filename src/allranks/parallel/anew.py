"""Layers that make a weight anew in each forward, of parameters that have other names.

`torch.nn.utils.spectral_norm`, `weight_norm` and `prune` take `weight` out of the layer's parameters and set it as a
plain attribute before each forward; the layer's class stays as it was. `torch.nn.utils.parametrize` makes a property of
it. Who cuts parameters finds no `weight` there: such a layer would compute with all of it, beside one that has a part.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

ATTENTION = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")

_HOOKS = {SpectralNorm: "spectral_norm", WeightNorm: "weight_norm", BasePruningMethod: "prune"}


def made_anew(module: nn.Module, names: Sequence[str] = ("weight", "bias")) -> str:
    """What of `names` the module has as a tensor and not as a parameter, in words; empty where that is nothing."""
    for name in names:
        # A property is asked of the class: to compute it may be dear.
        if parametrize.is_parametrized(module, name):
            return f"makes its {name} anew in each forward (torch.nn.utils.parametrize)"
        if isinstance(vars(module).get(name), torch.Tensor):
            return f"makes its {name} anew in each forward{_name_hook(module)}"
    return ""


def made_before_forward(module: nn.Module) -> str:
    """What a hook makes anew before the module's forward begins, in words; empty where that is nothing."""
    hook = _name_hook(module)
    found = next((name for name in vars(module) if isinstance(vars(module)[name], torch.Tensor)), "")
    return f"makes its {found or 'weight'} anew in each forward{hook}" if hook else ""


def _name_hook(module: nn.Module) -> str:
    """Whose hook takes parameters of the module away and sets what it computes of them, in brackets; or empty."""
    for hook in module._forward_pre_hooks.values():
        for kind, name in _HOOKS.items():
            if isinstance(hook, kind):
                return f" (torch.nn.utils.{name})"
    return ""
