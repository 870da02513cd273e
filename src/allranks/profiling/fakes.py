"""Tensors without memory: torch's fake ones, on which a model of any size runs its step on a laptop.

They are fake tensors of the processor, whatever the device that is planned for: autograd ends the process on fake CUDA
tensors where torch was built without CUDA.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from allranks.errors import TaskError
from allranks.users_code import user_place
from allranks.verdict import Decision

Model = nn.Module | dict[str, nn.Module]
REMEDY = "`allranks plan --measured` takes its profile from real steps on this machine instead"


def fake_mode() -> FakeTensorMode:
    """A mode in which new tensors take no memory; real ones that come in become fake."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake(mode: FakeTensorMode, batch: Any) -> Any:
    """A batch whose tensors have shapes and no values."""
    return pytree.tree_map_only(torch.Tensor, mode.from_tensor, batch)


def build_fake(build: Callable[[], Model], mode: FakeTensorMode) -> tuple[Model, tuple[Decision, ...]]:
    """What `build` makes, without its memory where it can be built so; else built in full once, said so."""
    try:
        with mode, _Copying():
            built = build()
        if not _holds_real(built):
            return built, ()
        because = "it brings tensors that were made before, with their memory"
    except Exception as error:
        # Whatever the user's code raised on fake tensors; where it is a real fault, the real build raises it again.
        because = f"building it without memory raised {type(error).__name__}: {_first_line(error)}"
        built = build()
    with FakeCopyMode(mode):
        return copy.deepcopy(built), (Decision("model() is built in full to be traced", because),)


def copy_fake(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy in `mode` of a module that is built, wherever its tensors lie: nowhere (meta), or in another mode."""
    with unset_fake_temporarily(), mode, _Copying():
        held = {id(tensor): _empty_like(tensor) for tensor in (*module.parameters(), *module.buffers())}
        return copy.deepcopy(module, dict[int, Any](held))


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the processor in the mode that is active."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


@final
class _Copying(TorchFunctionMode):
    """Lets fake tensors be deep-copied: of torch's own copies no view shares the memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__ or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _empty_like(tensor)
        return memo[id(tensor)]


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What `func` gives for real or fake tensors, and for fake ones what torch's kernels for shapes get wrong.

    Products of groups are known in bfloat16 alone; statistics of a norm have the input's type, not the weight's.
    """
    if not (args and isinstance(args[0], FakeTensor)):
        return func(*args, **kwargs)
    if func is torch.ops.aten._grouped_mm.default:
        return _group(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
    found = func(*args, **kwargs)
    if func in _NORMS:
        kinds = {t.dtype for t in args[1:] if isinstance(t, torch.Tensor)}
        wider = kinds.pop() if len(kinds) == 1 else args[0].dtype
        return found[0], *(part.to(wider) for part in found[1:])
    return found


_NORMS: Final = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit")
)


def _group(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    groups = () if offsets is None or left.dim() + right.dim() != 4 else (len(offsets),)
    rows = left.shape[:-1] if offsets is None else left.shape[-2:-1]
    return left.new_empty((*groups, *rows, right.shape[-1]))


def refuse(name: str, module: str, error: Exception) -> TaskError:
    """The TaskError for what a traced step raised: the operation, the module, the user's line and the way out."""
    return TaskError(f"{name} cannot be traced: {what_failed(error, module)}; {REMEDY}")


def what_failed(error: Exception, module: str) -> str:
    """What of an operation on tensors without memory raised, in which module, at which line of the user's."""
    where = ", ".join(filter(None, (f"in {module}" if module else "", user_place(error))))
    return f"{_what(error)}{f' ({where})' if where else ''}"


def advise_values(error: Exception) -> str:
    """The move that lets tensors without memory pass where `needs_values`; "" where `what_failed` names it."""
    if lacks_kernel(error):
        return ""
    if (reading := _reading(error)) is not None:
        return reading[1]
    if isinstance(error, DynamicOutputShapeException):
        return "keep the shape there, by torch.where or a product with the mask"
    if isinstance(error, DataDependentOutputException):
        return "choose by torch.where instead of a branch there, or leave the check out of the model while it trains"
    return LEAVE_OUT


def lacks_kernel(error: Exception) -> bool:
    """Whether an operation has no kernel for shapes."""
    return isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error)


def needs_values(error: Exception) -> bool:
    """Whether it raised because tensors without memory have no values, or no kernel for shapes."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(error, kinds) or lacks_kernel(error) or _reading(error) is not None or _is_of_fakes(error)


LEAVE_OUT: Final = "leave it out of the step while it is rehearsed"
_READINGS: Final = (
    (r"numpy", "it leaves torch for numpy, which needs values", "stay in torch there"),
    (r"FakeTensor\.__format__", "it writes a tensor into text, which needs values", LEAVE_OUT),
    (
        r"data is not allocated yet",
        "it makes a tensor of the numbers in others, which needs values",
        "join tensors by torch.stack or torch.cat there",
    ),
    (r"Sparse\w*TensorImpl", "it makes a sparse tensor, which needs values", "rehearse it with a dense one there"),
    (
        r"shape_env",
        "it makes a tensor whose sizes are data, as a jagged one's are, which needs values",
        "rehearse it with a padded one and a mask there",
    ),
    (r"WeakValueDictionary", "it saves a tensor (torch.save, pickle), which needs values", LEAVE_OUT),
    (r"Not available for 'meta' device", "it reads a tensor's memory, which needs values", LEAVE_OUT),
)
"""(What torch's error says, what was done there, the next move): errors that torch has no class of their own for."""


def _reading(error: Exception) -> tuple[str, str] | None:
    """(What was done, the next move) where torch's words alone tell that values were read."""
    said = str(error)
    found = (move for pattern, *move in _READINGS if re.search(pattern, said, re.IGNORECASE))
    what, advice = next(found, ("", ""))
    return (f"{what}, and a trace has none", advice) if what else None


def _is_of_fakes(error: Exception) -> bool:
    """Whether torch complains of tensors without memory as such.

    Where it only names their type (`'FakeTensor' object is not callable`, `got FakeTensor`), or two devices, real ones
    would raise the same.
    """
    said = str(error)
    named = re.search(r"(?<!')(?<!not )(?<!got )FakeTensor(?!')", said) and "argument" not in said
    apart = type(error).__name__ == "FakeTensorDeviceMismatchError" or "Device Propagation" in said
    return bool(named and not apart) or re.match(r"NYI: ", said) is not None


def _what(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException) and "_local_scalar_dense" in str(error.func):
        return "aten._local_scalar_dense (`.item()`, or a branch on a tensor) needs values, and a trace has none"
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"{error.func} needs values, and a trace has none"
    custom = re.search(r"no fake impl registered for \S*?(\w+::\w+)", str(error))
    if custom or isinstance(error, UnsupportedOperatorException):
        operation = custom[1] if custom else error.func  # type: ignore[attr-defined]
        return f"{operation} has no kernel for shapes alone; torch.library.register_fake gives it one"
    if (reading := _reading(error)) is not None:
        return reading[0]
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    """Without torch's lecture on linkers, which is one line of a thousand letters."""
    return next(iter(str(error).splitlines()), "").partition(" PyTorch splits its backend")[0]


def _holds_real(built: Any) -> bool:
    modules = built.values() if isinstance(built, dict) else [built]
    found = (t for m in modules if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers()))
    return not all(isinstance(tensor, FakeTensor) for tensor in found)
