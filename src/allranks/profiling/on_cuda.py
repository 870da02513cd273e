"""What a GPU's step keeps and a processor's does not, and the other way: the processor's step, run as a GPU would.

Four things differ under the same model (torch 2.13). CUDA's autocast brings the types of more operations together (the
lists in ATen/autocast_mode.h; a processor's are shorter and hold no norm, no softmax, no matrix times a vector). Its
dropout is one kernel, whose backward keeps a mask of one byte an element. Its RMSNorm is one kernel, which keeps its
input and one number a row. Its attention is one kernel with dropout too. They are put in the place of the processor's
for as long as the trace lasts.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch.autograd import Function
from torch.library import Library
from torch.utils import _pytree as pytree

_ATEN: Final = torch.ops.aten
_FLOAT32: Final = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "rms_norm", "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss"),
    *("nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("mse_loss", "margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss"),
    *("binary_cross_entropy_with_logits", "cdist", "logsumexp"),
)
"""CUDA's list AT_FORALL_FP32, without resizing of images and rare norms: floating inputs are cast to float32."""
_FLOAT32_RESULT: Final = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "cumsum", "cumprod")
"""AT_FORALL_FP32_SET_OPT_DTYPE: where no type is asked for, float32 is."""

_LOWERED: Final = (
    *("convolution", "mv", "addmv", "addr", "chain_matmul", "linalg_multi_dot"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
)
"""Of AT_FORALL_LOWER_PRECISION_FP what the processor's list lacks: cast to autocast's type."""
_PROMOTED: Final = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "tensordot", "index_put", "scatter_add"),
)
"""AT_FORALL_PROMOTE without grid_sampler, which the processor's has: cast to the widest type among them."""


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Meanwhile the processor's tensors, fake or real, run what a GPU would run; for the whole process."""
    library = Library("aten", "IMPL")
    try:
        for name in _FLOAT32:
            _replace(library, name, partial(_cast, to=_lift_all), "AutocastCPU")
        for name in _LOWERED:
            _replace(library, name, partial(_cast, to=_lower_all), "AutocastCPU")
        for name in _PROMOTED:
            _replace(library, name, partial(_cast, to=_promote_all), "AutocastCPU")
        for name in _FLOAT32_RESULT:
            _replace(library, name, _lifted_result, "AutocastCPU")
        _replace(library, "dropout", _dropout, "AutogradCPU")
        _replace(library, "rms_norm", _rms_norm, "AutogradCPU")
        _replace(library, "scaled_dot_product_attention", _attention, "AutogradCPU")
        yield
    finally:
        library._destroy()


def _replace(library: Library, name: str, make: Callable[[Any], Callable[..., Any]], key: str) -> None:
    packet, _, overload = name.partition(".")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        library.impl(name, make(getattr(getattr(_ATEN, packet), overload or "default")), key)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


_ELIGIBLE: Final = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts; float64 stays as it is."""


def _cast_all(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.dtype in _ELIGIBLE else one, tree)


def _lift_all(tree: Any) -> Any:
    return _cast_all(tree, torch.float32)


def _lower_all(tree: Any) -> Any:
    return _cast_all(tree, torch.get_autocast_dtype("cpu"))


def _promote_all(tree: Any) -> Any:
    kinds = {leaf.dtype for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return _lift_all(tree) if torch.float32 in kinds else _lower_all(tree)


def _cast(func: Any, to: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = to((args, kwargs))
            return func(*args, **kwargs)

    return run


def _lifted_result(func: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        lower = args[0].dtype in (torch.bfloat16, torch.float16)
        with _without_autocast():
            return func(*args, **({"dtype": torch.float32, **kwargs} if lower else kwargs))

    return run


def _dropout(func: Any) -> Callable[..., Any]:
    def run(value: torch.Tensor, p: float, train: bool) -> Any:
        if not train or not 0 < p < 1:
            return _parts(func, value, p, train)
        return _ATEN.native_dropout(value, p, train)[0]

    return run


def _rms_norm(func: Any) -> Callable[..., Any]:
    def run(value: torch.Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        if weight is None:
            return _parts(func, value, shape, weight, eps)
        return _FusedRMSNorm.apply(value, weight, math.prod(shape))  # type: ignore[no-untyped-call]

    return run


def _attention(func: Any) -> Callable[..., Any]:
    def run(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
        if len(rest) > 1:
            rest = (rest[0], 0.0, *rest[2:])
        return _parts(func, query, key, value, *rest, **{**kwargs, **({"dropout_p": 0.0} if len(rest) < 2 else {})})

    return run


def _parts(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What the operation does without us."""
    return func.decompose(*args, **kwargs)


class _FusedRMSNorm(Function):
    """Reads, writes and keeps what `aten::_fused_rms_norm` does; its values are of no use."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
        rows = value.new_empty((value.numel() // width, 1), dtype=torch.float32)
        ctx.save_for_backward(value, weight, rows)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        value, weight, _ = ctx.saved_tensors
        return gradient * value, torch.empty_like(weight), None
