"""What a kernel is: its kind, its floating-point operations and its shape, from aten's name and arguments.

FLOPs are torch's own formulas (torch.utils.flop_counter) where it has one: products of matrices, convolutions and
attention, forward and backward; a product and a sum count as two. Three kernels that it does not know are added: fused
attention on a processor, products of groups of rows (experts), and a matrix times a vector. Queries that share heads of
keys count as if each had its own, as torch 2.13 counts them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from allranks.model_profile import Kind

_KINDS: Mapping[Kind, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_grouped_mm", "_scaled_mm"),
    "conv": ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "convolution_overrideable"),
    "embedding": ("embedding", "_embedding_bag", "_embedding_bag_forward_only"),
    "norm": (
        *("native_layer_norm", "native_batch_norm", "cudnn_batch_norm", "native_group_norm", "_fused_rms_norm"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "batch_norm_with_update"),
    ),
    "loss": (
        *("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "binary_cross_entropy", "smooth_l1_loss"),
        *("huber_loss", "binary_cross_entropy_with_logits", "kl_div"),
    ),
    "route": (
        *("sort", "topk", "argsort", "index", "index_put", "index_put_", "index_add", "index_select", "gather"),
        *("scatter", "scatter_", "scatter_add", "searchsorted", "bincount", "histc", "nonzero", "one_hot"),
    ),
    "scan": ("cumsum", "cumprod", "logcumsumexp", "mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell"),
}
_KIND_OF: Mapping[str, Kind] = {name: kind for kind, names in _KINDS.items() for name in names}
_ATTENTION = ("scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward", "flex_attention")


def name_of(func: Any) -> str:
    """Aten's name of a kernel, "addmm"; of an operator over functions (flex attention, cond) its own."""
    packet = getattr(func, "overloadpacket", func)
    return str(packet.__name__)


def kind_of(name: str) -> Kind:
    """The kind of aten's kernel `name`; what nobody knows is bound by memory."""
    if any(part in name for part in _ATTENTION) and "backward" not in name:
        return "attention"
    return _KIND_OF.get(name, "elementwise")


def count_flops(func: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> float:
    """Operations of one call; 0 of what computes no products."""
    own = _OWN_FLOPS.get(name_of(func))
    if own is not None:
        return float(own(args))
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=found))


def shape_of(name: str, args: Any, found: Any) -> tuple[int, ...]:
    """(rows, output features, input features) of a product or a convolution, (queries, keys, heads, kv heads, head dim)
    of attention; () of all others. Rows count those of the whole call.
    """
    kind = kind_of(name)
    if kind == "attention":
        query, key = args[0].shape, args[1].shape
        return (query[-2], key[-2], query[-3], key[-3], query[-1]) if len(query) > 3 else ()
    if kind == "conv":
        out = found if isinstance(found, torch.Tensor) else found[0]
        return (out.shape[0] * math.prod(out.shape[2:]), out.shape[1], math.prod(args[1].shape[1:]))
    if kind != "matmul":
        return ()
    left, right = (args[1], args[2]) if name in ("addmm", "baddbmm", "addmv") else (args[0], args[1])
    columns = right.shape[-1] if right.dim() > 1 else 1
    return (math.prod(left.shape[:-1]), columns, left.shape[-1])


def is_causal(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether attention was told that no position sees those after it."""
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "is_causal":
            return bool(kwargs.get("is_causal", args[place] if place < len(args) else False))
    return False


def _grouped_flops(args: Any) -> float:
    left, right = args[0], args[1]
    # Rows that are shared out among groups, or one matrix for each group.
    rows = math.prod(left.shape[:-1])
    return 2.0 * rows * left.shape[-1] * right.shape[-1] if right.dim() > 2 or left.dim() > 2 else _weights(left, right)


def _weights(left: torch.Tensor, right: torch.Tensor) -> float:
    """The gradient of stacked matrices: every row counts in one of them."""
    return 2.0 * left.shape[0] * left.shape[1] * right.shape[1]


def _vector_flops(place: int) -> Callable[[Any], float]:
    return lambda args: 2.0 * float(math.prod(args[place].shape))


def _attention_flops(count: Callable[..., int], number: int) -> Callable[[Any], float]:
    """torch's count, from the first `number` arguments, of the query's heads: 2.11 knows no grouped queries."""

    def flops(args: Any) -> float:
        shapes = [tuple(args[place].shape) for place in range(number)]
        heads = max(shape[1] for shape in shapes)
        return float(count(*((shape[0], heads, *shape[2:]) for shape in shapes)))

    return flops


_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_OWN_FLOPS: Mapping[str, Callable[[Any], float]] = {
    **{f"_scaled_dot_product_{kernel}": _attention_flops(sdpa_flop_count, 3) for kernel in _FUSED},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_flops(sdpa_backward_flop_count, 4) for kernel in _FUSED},
    "_grouped_mm": _grouped_flops,
    "mv": _vector_flops(0),
    "addmv": _vector_flops(1),
}
