"""Whether the kernel of a real device takes the types that a step gives an operator.

torch's kernels for shapes promote types where those of devices refuse them. For products a rule says so. For other
operators the processor's kernel is called, on a few zeros: for those of a list that `tools/kernel_types.py` makes of
torch's own samples, and for a GPU those of them of which its kernels are known to refuse as much. What is refused is a
fault only where the kernel takes the same zeros in one type: whatever else is wrong with so small a call says nothing
of the step.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

Refused = Mapping[str, Sequence[str]]
"""Names of operators by list."""
Types = Mapping[torch.dtype, torch.dtype]
"""Which types are given as which other ones."""

_PRODUCTS: Final = {"mm", "bmm", "addmm", "baddbmm", "convolution"}
_BATCH_NORMS: Final = {"native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"}
_MIXED: Final = _BATCH_NORMS.union(
    ("mv", "addmv", "addbmm", "_cdist_forward", "_euclidean_dist"),
    ("native_layer_norm", "native_group_norm"),
    ("index_put_", "_index_put_impl", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "put"),
    ("index_add", "index_copy", "index_reduce", "index_fill", "index_select", "searchsorted"),
    ("nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy", "huber_loss_backward"),
    ("multi_margin_loss", "multilabel_margin_loss_forward"),
    ("_embedding_bag", "_embedding_bag_forward_only", "complex", "polar", "heaviside"),
)
"""With their forms in place. Not every operator, because some kernels end the process on zeros that mean nothing.

What CUDA's autocast brings to one type (a norm, a matrix times a vector) it has brought there before: a rehearsal for
GPUs runs its lists (profiling/on_cuda.py). What comes here in several types had them without it.
"""
REFUSED: Final = Path(__file__).parent / "data" / "refused_types.json"
"""Of processors: "mixed", operators whose kernel refuses types of which those for shapes make one, and "alone", those
that lack a kernel for a type; of the torch that the file names. Others may differ: each kernel is asked where it runs.

Not all of them are asked for a GPU: CUDA's autocast brings forms of some (`linalg_cross`, `grid_sampler_2d`,
`index_put`) to one type (AT_FORALL_PROMOTE, autocast_mode.h), and of most its kernels' refusals are not known.
"""
_SMALL_INTEGERS: Final = (torch.int8, torch.int16, torch.int32, torch.uint8)
_LONGEST = 3
"""Elements along a dim: vectors of a cross product and places in a volume have three."""


@final
class Kernels:
    """Asks each kernel once for each mix of types and sizes.

    Args:
        on_cuda: whether the processor's tensors stand for a GPU's: only what its kernels refuse too is a fault.
        refused: names by list, as in the file REFUSED; None: its own.
    """

    def __init__(self, *, on_cuda: bool, refused: Refused | None = None) -> None:
        self._on_cuda = on_cuda
        lists: Refused = {} if on_cuda else read_refused() if refused is None else refused
        self._alone = frozenset(lists.get("alone", ()))
        self._mixed = _MIXED.union(lists.get("mixed", ()))
        self._known: dict[Any, str | None] = {}

    def check(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """RuntimeError where no kernel takes these types; `name` is the schema's."""
        if not name.startswith("aten::"):
            return
        short = name.removeprefix("aten::")
        _check_product(short, args)
        plain = short.removesuffix("_")
        if plain not in self._alone and not {short, plain} & self._mixed:
            return
        # A processor's batch norm refuses statistics of another type; of a GPU's that is not known.
        seen = args[:3] if self._on_cuda and short in _BATCH_NORMS else (args, kwargs)
        kinds = {tensor.dtype for tensor in _tensors(seen)}
        if not ({short, plain} & self._mixed if len(kinds) > 1 else plain in self._alone):
            return
        given = _tensors((args, kwargs))
        key = func, *((tensor.dtype, _few(tensor.shape)) for tensor in given)
        if key not in self._known:
            self._known[key] = find_refusal(func, args, kwargs, list(dict.fromkeys(one.dtype for one in given)))
        refusal = self._known[key]
        if refusal is not None:
            raise RuntimeError(f"{short} {refusal}")


@functools.cache
def read_refused() -> Refused:
    """The file REFUSED."""
    lists: Refused = json.loads(REFUSED.read_text())
    return lists


def _check_product(short: str, args: Sequence[Any]) -> None:
    given = args[:2] if short == "_grouped_mm" else args if short in _PRODUCTS else ()
    kinds = {arg.dtype for arg in given if isinstance(arg, torch.Tensor)}
    if len(kinds) > 1:
        raise RuntimeError(f"{short} expects operands of one dtype, and gets {_say(kinds)}")


def find_refusal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kinds: list[torch.dtype]) -> str | None:
    """What the processor's kernel says of these types, and which ones it takes; None where it may be of use."""
    # Autocast has done its part before.
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        said = _call(func, args, kwargs, {})
        if said is None:
            return None
        for types in _list_controls(kinds):
            if _call(func, args, kwargs, types) is None:
                taken = {types.get(kind, kind) for kind in kinds}
                return f"refuses {_say(kinds)}: {said.rstrip('.')}; it takes {_say(taken)}"
    return None


def _list_controls(kinds: Sequence[torch.dtype]) -> Iterator[Types]:
    """The same in fewer types: one for floats and long integers; floats alone, as a target may have to be."""
    if len(kinds) == 1:
        yield {kinds[0]: torch.float32}
        return
    floats = [kind for kind in kinds if kind.is_floating_point or kind.is_complex]
    longs = dict.fromkeys(_SMALL_INTEGERS, torch.int64)
    yield longs
    for kind in floats:
        yield {**longs, **dict.fromkeys(floats, kind)}
    for kind in floats:
        yield dict.fromkeys((other for other in kinds if other is not torch.bool), kind)


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> str | None:
    """The first line of what it raises on zeros."""
    few = _fixed(args, types) if func is torch.ops.aten.native_group_norm.default else _shrink(args, types)
    try:
        func(*few, **{name: _shrink(value, types) for name, value in kwargs.items()})
    except Exception as error:  # whatever a kernel raises
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


def _shrink(value: Any, types: Types) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(_few(value.shape), dtype=types.get(value.dtype, value.dtype), device="cpu")
    if isinstance(value, list | tuple):
        return [min(one, _LONGEST) if type(one) is int else _shrink(one, types) for one in value]
    return value


def _fixed(args: Sequence[Any], types: Types) -> list[Any]:
    """A group norm's sizes stand beside its tensors, as numbers."""
    value, weight, bias, *_, eps = args
    given = [None if one is None else one.new_empty(2) for one in (weight, bias)]
    return [*_shrink([value.new_empty((2, 2, 2)), *given], types), 2, 2, 2, 1, eps]


def _few(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(size, _LONGEST) for size in shape)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _say(kinds: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
