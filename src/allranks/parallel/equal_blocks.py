"""Which of a list of blocks are equal in all that can be seen of them: one of these may stand for the others.

Seen are their modules' types, what they print, plain attributes, functions and other objects; shapes, types and strides
of tensors, and the values of those that are no parameters; what learns; hooks. Not a difference is a number that does
nothing but count the blocks, by its name and by its values (Hugging Face: `layer_idx`). Nobody can see that a forward
reads such a number: that is what a name is trusted for.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from numbers import Number
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, final

import torch
from torch import nn

COUNTERS: Final = ("idx", "index", "number", "layer_id", "layer_num")
"""How a block's own number among its neighbours is called, whatever stands before."""
TORCHS_OWN: Final = frozenset(vars(nn.Module())) - {"training"}
HOOKS: Final = tuple(sorted(name for name in TORCHS_OWN if "hooks" in name))
OURS: Final = ("torch", "allranks")
"""Whose functions and objects on a block are known by their code and type: what else they hold is whose they are."""
DEEPEST: Final = 4
"""How far what an attribute holds is followed, object by object."""
_Path = tuple[str, str]
"""(Module inside of the block, what of it is told.)"""
_PLAIN: Final = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, Number)
_CALLED: Final = (FunctionType, MethodType, functools.partial, BuiltinFunctionType)


def kinds_of(blocks: Sequence[nn.Module], *, most: int | None = None) -> list[int]:
    """For each of the neighbours in a list a number: the same for those that are equal.

    Args:
        most: elements up to which tensors that are no parameters are compared by value; None: all. Those without
            values (of the meta device, or fake) are equal where shape, type and strides are.
    """
    looks = _Looks(most)
    seen = [looks.see(block) for block in blocks]
    counting = {path for some in seen for path in some if _counts(seen, path)}
    found: list[dict[_Path, object]] = []
    kinds: list[int] = []
    for some in seen:
        kept = {path: value for path, value in some.items() if path not in counting}
        kind = next((number for number, other in enumerate(found) if other == kept), len(found))
        if kind == len(found):
            found.append(kept)
        kinds.append(kind)
    return kinds


def compared_tensors(block: nn.Module) -> Iterator[torch.Tensor]:
    """Those of a module that are compared by value, and a list's or tuple's: its buffers and tensors as attributes."""
    for module in block.modules():
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
        for name, value in vars(module).items():
            rows = value if isinstance(value, list | tuple) else [value]
            yield from (one for one in rows if name not in TORCHS_OWN and isinstance(one, torch.Tensor))


def _counts(seen: Sequence[Mapping[_Path, object]], path: _Path) -> bool:
    """Whether a whole number that is called a counter grows with the blocks, or with those that have it."""
    if not path[-1].endswith(COUNTERS):
        return False
    told = [(place, some[path]) for place, some in enumerate(seen) if path in some]
    numbers = [(place, value[-1]) for place, value in told if isinstance(value, tuple) and value[0] is int]
    if len(numbers) < len(told):
        return False
    steps = [(int(later) - int(value), place - before) for (before, value), (place, later) in pairwise(numbers)]
    return all(step == 1 for step, _ in steps) or all(step == places for step, places in steps)


@final
class _Looks:
    """What can be seen of blocks; an object that several of them hold is described once."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._known: dict[tuple[int, int], object] = {}

    def see(self, block: nn.Module) -> dict[_Path, object]:
        """What is compared of a block, by where it is found."""
        seen: dict[_Path, object] = {("", "()"): _printed(block)}
        names = {id(module): name for name, module in reversed([*block.named_modules()])}
        first: dict[int, str] = {}
        for name, module in block.named_modules():
            seen[name, "type"] = self._of_class(type(module), DEEPEST)
            seen[name, "modules"] = [(key, names.get(id(member))) for key, member in module._modules.items()]
            seen[name, "hooks"] = [self._hooks(getattr(module, hooks, None)) for hooks in HOOKS]
            seen[name, "kept"] = sorted(module._buffers.keys() - module._non_persistent_buffers_set)
            for key, parameter in module._parameters.items():
                shared = first.setdefault(id(parameter), f"{name}.{key}")
                seen[name, f"parameter {key}"] = None if parameter is None else (shared, *self._parameter(parameter))
            for key, buffer in module._buffers.items():
                seen[name, f"buffer {key}"] = None if buffer is None else _Tensor(buffer, self._most)
            for key, value in vars(module).items():
                if key not in TORCHS_OWN:
                    seen[name, f".{key}"] = self._describe(value, DEEPEST)
        return seen

    def _hooks(self, hooks: Any) -> object:
        return [self._describe(hook, DEEPEST) for hook in hooks.values()] if isinstance(hooks, dict) else hooks

    def _parameter(self, parameter: torch.Tensor) -> tuple[object, object]:
        return _Tensor(parameter, -1), self._hooks(parameter._backward_hooks)

    def _describe(self, value: Any, depth: int) -> object:
        """What is equal for equal values."""
        if value is None or isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, torch.Tensor):
            return _Tensor(value, self._most)
        if isinstance(value, type):
            return self._of_class(value, depth)
        if isinstance(value, nn.Module) or not depth:
            return type(value).__qualname__
        if isinstance(value, _CALLED):
            return self._called(value, depth - 1)
        if isinstance(value, list | tuple):
            return type(value), [self._describe(one, depth - 1) for one in value]
        if isinstance(value, set | frozenset):
            return type(value), sorted(repr(one) for one in value)
        if isinstance(value, dict):
            return type(value), [(repr(key), self._describe(one, depth - 1)) for key, one in value.items()]
        return self._once(value, depth, self._by_attributes)

    def _once(self, value: Any, depth: int, describe: Callable[[Any, int], object]) -> object:
        key = id(value), depth
        if key not in self._known:
            self._known[key] = type(value).__qualname__  # what leads back to itself
            self._known[key] = describe(value, depth - 1)
        return self._known[key]

    def _by_attributes(self, value: Any, depth: int) -> object:
        """By its type and its attributes; an array of numpy's by its bytes."""
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):
            return type(value), str(value.dtype), value.shape, value.tobytes()
        held = {} if _is_ours(type(value)) else getattr(value, "__dict__", {})
        return self._of_class(type(value), depth), {name: self._describe(one, depth) for name, one in held.items()}

    def _called(self, value: Any, depth: int) -> object:
        if isinstance(value, functools.partial):
            return [self._describe(one, depth) for one in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            owner = type(value.__self__) if _is_ours(value.__func__) else value.__self__
            return self._describe(value.__func__, depth), self._describe(owner, depth)
        if isinstance(value, BuiltinFunctionType) or _is_ours(value):
            return getattr(value, "__code__", value)
        given = (value.__defaults__, value.__kwdefaults__, [_held(cell) for cell in value.__closure__ or ()])
        return value.__code__, [self._describe(one, depth) for one in given]

    def _of_class(self, kind: type, depth: int) -> object:
        """By its name; one that a function has made by its own functions, too."""
        name = (kind.__module__, kind.__qualname__)
        if "<locals>" not in kind.__qualname__ or not depth:
            return name
        return self._once(kind, depth, lambda made, left: (name, self._functions(made, left)))

    def _functions(self, kind: type, depth: int) -> object:
        functions = ((name, value) for name, value in vars(kind).items() if isinstance(value, FunctionType))
        return [(name, self._describe(value, depth)) for name, value in functions]


@final
class _Tensor:
    """What is compared of a tensor."""

    def __init__(self, tensor: torch.Tensor, most: int | None) -> None:
        self._looks: tuple[object, ...] = (type(tensor).__qualname__, tensor.requires_grad, tensor.dtype)
        self._value: torch.Tensor | None = None
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            return
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        self._looks += (tuple(tensor.shape), strides, tensor.layout, tensor.device, getattr(tensor, "placements", ()))
        local = getattr(tensor, "_local_tensor", tensor)
        empty = local.is_meta or hasattr(local, "fake_mode")
        if not empty and (most is None or tensor.numel() <= most):
            self._value = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor) or self._looks != other._looks:
            return False
        if self._value is None or other._value is None or self._value is other._value:
            return self._value is other._value
        try:
            return torch.equal(self._value, other._value)
        except (RuntimeError, NotImplementedError):
            return False  # of a kind that torch does not compare

    __hash__ = None  # type: ignore[assignment]


def _printed(block: nn.Module) -> str:
    try:
        return repr(block)
    except Exception:  # the user's code, which may print a value that a fake tensor has not
        return type(block).__qualname__


def _is_ours(made: Any) -> bool:
    return str(getattr(made, "__module__", "")).partition(".")[0] in OURS


def _held(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _held  # nothing yet
