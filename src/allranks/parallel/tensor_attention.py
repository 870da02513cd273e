"""torch's own attention layers under tensor parallelism: each rank has some of the heads.

`nn.MultiheadAttention` packs the weights of query, key and value one behind the other, [3 * channels, channels]. A rank
keeps its heads' rows of all three, counted in turn (row 3 * r + m is row r of matrix m), so that they are a range of
rows and may be cut further; a checkpoint has them as torch does. The output projection is cut by rows. Source:
Megatron-LM (arXiv 1909.08053); the arithmetic is that of `torch.nn.functional.multi_head_attention_forward`.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allranks.parallel.anew import ATTENTION, made_anew
from allranks.parallel.tensor_flow import Flow
from allranks.parallel.tensor_ops import enter, gather, leave

PACKED = 3  # query, key and value
_HEADS = 1
_PER_HEAD = 3  # dims of a mask that tells heads apart

# num_heads, kv_heads; n_head, nhead, num_kv_head, n_head_kv; head_num, head_count.
_COUNT = re.compile(r"heads|(^|_)(n|nb|num|number)_?(\w+_)?head(_(kv|q|query|key|value))?$|head_(num|number|count)$")
_NO_COUNT = re.compile(r"(^|_)(dim|dims|size|width|channels|features|index|idx|id)(_|$)")

# Activations of torch's layers that are functions, not modules.
_ELEMENTWISE = frozenset(["relu", "relu6", "gelu", "silu", "elu", "selu", "leaky_relu", "mish", "tanh", "sigmoid"])


def why_not_heads(module: nn.Module) -> str:
    """What keeps `module` from being cut between its heads, as the end of a sentence; empty where nothing does."""
    if not isinstance(module, nn.MultiheadAttention):
        return f"is {type(module).__name__}"
    if type(module).forward is not nn.MultiheadAttention.forward:
        return f"is {type(module).__name__}, which has a forward of its own"
    if reason := made_anew(module, ATTENTION):
        return reason
    if reason := made_anew(module.out_proj):
        return f"has an out_proj that {reason}"
    if type(module.out_proj) is not nn.modules.linear.NonDynamicallyQuantizableLinear:
        return f"has an out_proj of its own, {type(module.out_proj).__name__}"
    if module.bias_k is not None:
        return "has add_bias_kv, keys and values beside the heads'"
    return "has add_zero_attn, keys and values beside the heads'" if module.add_zero_attn else ""


def counts_heads(attribute: str, value: object) -> bool:
    """Whether an attribute says how many heads there are (num_heads, n_head), not how large one is (head_dim)."""
    name = attribute.lower()
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and _COUNT.search(name) is not None and _NO_COUNT.search(name) is None


def has_feed_forward(module: nn.Module) -> bool:
    """Whether `module` is a layer of torch's encoder or decoder, whose `linear1` and `linear2` are a pair.

    Their activation is a function or a module; one that is not known to be element-wise parts them.
    """
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        if isinstance(module, kind) and type(module)._ff_block is kind._ff_block:
            activation: Any = module.activation
            common = isinstance(activation, nn.ReLU | nn.GELU | nn.SiLU | nn.Tanh | nn.ELU | nn.LeakyReLU | nn.Mish)
            known = common or getattr(activation, "__name__", "") in _ELEMENTWISE
            plain = not made_anew(module.linear1) and not made_anew(module.linear2)
            return known and plain and type(module.linear1) is type(module.linear2) is nn.Linear
    return False


def leave_fused_path(modules: Mapping[str, nn.Module], ruled: Collection[str]) -> None:
    """Keep torch's encoder from its fused kernels of evaluation, which take whole weights past the layers' forwards.

    Args:
        modules: all of them, by name.
        ruled: names of those that compute with parts.
    """
    for name, module in modules.items():
        if not any(other.startswith(f"{name}." if name else "") for other in ruled):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # to torch: no kernel has its activation
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def attend_with_heads(
    module: Any,
    flow: Flow,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `nn.MultiheadAttention.forward` makes of its arguments before the output projection, with this rank's heads.

    Returns:
        [..., channels of this rank's heads] in the order of the arguments, and the weights of all heads where they are
        needed.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal says what attn_mask is: give attn_mask too")
    cut = flow.meets_positions(module)
    entered = [flow.enter(given, cut=cut) for given in (query, key, value)]
    if not cut:  # else the region is open: a recomputed block begins inside of it, and has the generator from there
        flow.regions.enter()
    batched = query.ndim == _PER_HEAD
    rows = [_batch_first(given, batched, module.batch_first) for given in entered]
    size = dist.get_world_size(flow.group)
    num_heads = module.num_heads // size
    q, k, v = (part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in _project(module, rows))
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        is_causal = is_causal and key_padding_mask is None
        mask = _join_masks(module, flow, q, k, attn_mask, key_padding_mask)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        found = weights @ v
        if average_attn_weights:
            weights = leave(weights.sum(_HEADS), flow.group) / module.num_heads
        else:
            weights = gather(weights, flow.group, _HEADS, module.num_heads)
        weights = weights if batched else weights.squeeze(0)
    else:
        found = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    joined = found.transpose(1, 2).flatten(-2)
    if not batched:
        return joined.squeeze(0), weights
    return (joined if module.batch_first else joined.transpose(0, 1)), weights


def _batch_first(given: torch.Tensor, batched: bool, batch_first: bool) -> torch.Tensor:
    if not batched:
        return given.unsqueeze(0)
    return given if batch_first else given.transpose(0, 1)


def _project(module: Any, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Query, key and value of this rank's heads; the weights are views, their gradient is put together at once."""
    if module.in_proj_weight is None:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    else:
        weights = module.in_proj_weight.unflatten(0, (-1, PACKED)).unbind(1)
    none = (None, None, None)
    biases = none if module.in_proj_bias is None else module.in_proj_bias.unflatten(0, (-1, PACKED)).unbind(1)
    return [functional.linear(*given) for given in zip(rows, weights, biases, strict=True)]


def _join_masks(
    module: Any,
    flow: Flow,
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
) -> torch.Tensor | None:
    """What is added to the scores [batch, this rank's heads, queries, keys], in fewer dims where it can be."""
    batch, num_heads, num_queries, _ = query.shape
    num_keys, found = key.shape[2], None
    if attn_mask is not None:
        found = _as_addend(attn_mask, "attn_mask", query, flow)
        if found.ndim == _PER_HEAD:
            found = found.view(batch, module.num_heads, num_queries, num_keys)
            found = found.narrow(_HEADS, flow.rank * num_heads, num_heads)
        elif found.shape != (num_queries, num_keys):
            raise RuntimeError(f"attn_mask is {tuple(found.shape)}, and should be {(num_queries, num_keys)}")
        else:
            found = found.view(1, 1, num_queries, num_keys)
    if key_padding_mask is not None:
        padding = _as_addend(key_padding_mask, "key_padding_mask", query, flow).view(batch, 1, 1, num_keys)
        found = padding if found is None else found + padding
    return found


def _as_addend(mask: torch.Tensor, name: str, query: torch.Tensor, flow: Flow) -> torch.Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise RuntimeError(f"{name} is of {mask.dtype}: a mask is bool, or floating numbers that are added")
    # One that is learnt sees this rank's heads only.
    return enter(mask, flow.group) if mask.requires_grad and torch.is_grad_enabled() else mask
