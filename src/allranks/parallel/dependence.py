"""What in a forward depends on the modules of a pipeline's stages, whether they learn or not.

Only what no module of a stage has had a part in can a later stage make by itself: there these modules return zeros. So
their outputs are marked, and so is all that is made of them between modules, floating or not, with gradients or
without. Marked are storages: views share theirs, and what is written into one stays written.

A stage that has been entered has the real tensors of what began it and zeros of everything else that earlier stages
make. Code that uses such zeros computes something else, and reading a value (`if mask.any()`) makes a number of them
that nobody can follow: the first such use is noted in words. A parameter of another stage is not even zeros: it has
no memory here, and its use between modules is refused.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdRef

from allranks.errors import LayoutError

# What these return depends on the shape and type of their first argument alone,
_LIKE = {f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")} | {
    f"new_{kind}" for kind in ("zeros", "ones", "empty", "full", "tensor")
}
# and of these on those of every other one.
_AS = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero"} | {
    f"__{name}__" for name in ("bool", "int", "float", "complex", "index", "array", "contains")
}
_CONSTANT = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device
LIBRARIES = Path(torch.__file__).parent, Path(__file__).parent.parent


@final
class Dependence(TorchFunctionMode):
    """Follows one forward of one stage, between modules.

    Args:
        module: the one that is cut, whose parameters and buffers are on the meta device where other stages have them.

    Attributes:
        wrong: the first use of zeros in place of what another stage has computed, in words; "" where there was none.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self._module = module
        self.wrong = ""
        self._marked: set[object] = set()
        self._zeros: set[object] = set()
        self._made: list[object] = []
        self._live = False

    def begin(self, received: object) -> None:
        """From here on what has been marked before is zeros of another stage; `received` is not."""
        self._zeros, self._marked, self._made, self._live = self._marked, set(), [], True
        self.mark(received)

    def mark(self, value: object, given: object = ()) -> None:
        """A module has returned `value`, any pytree, for `given`."""
        known = {id(leaf) for leaf in pytree.tree_leaves(given)}
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._marked.add(_key(leaf))
            elif id(leaf) not in known and not isinstance(leaf, _CONSTANT):
                self._made.append(leaf)

    def holds(self, leaf: object) -> bool:
        """Whether it is a tensor that depends on a module."""
        return isinstance(leaf, torch.Tensor) and _key(leaf) in self._marked

    def check_sent(self, name: str, leaves: Sequence[object]) -> None:
        """Note what begins the next stage, module `name`, and cannot be sent: an object that a module has made."""
        for leaf in leaves:
            if any(leaf is made for made in self._made):
                what = f"{name} is called with a {type(leaf).__name__} that a module before it has made"
                self._note(f"{what}, and only tensors, and tuples, lists and dicts of them, pass from stage to stage")

    def check_call(self, name: str, leaves: Sequence[object]) -> None:
        """Note a call of module `name` with what has not come with what began this stage."""
        if self._has_zeros(leaves):
            self._note(f"{name} is called with a tensor of an earlier stage that is no argument where this one begins")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside nothing is followed: what a module does is its own, and torch's compiler minds such modes."""
        if _get_current_function_mode() is self:
            with _pop_mode_temporarily():
                yield
        else:
            yield

    def __torch_function__(
        self, function: Callable[..., Any], kinds: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        given = [t for t in valued(name, args, kwargs or {}) if isinstance(t, torch.Tensor)]
        try:
            result = function(*args, **(kwargs or {}))
        except Exception as error:
            self._check_held(given, name, error)
            raise
        # What returns nothing has written into its first argument.
        made = [t for t in pytree.tree_leaves(args[:1] if result is None else result) if isinstance(t, torch.Tensor)]
        if not made and name not in _READS:
            return result  # shapes, types, devices
        self._check_held(given, name)
        if any(map(self.holds, given)):
            self._marked.update(map(_key, made))
            if not self._live and name in _READS:
                self._note(f"{user_place()} reads the value of a tensor that another stage computes ({name})")
        if self._has_zeros(given):
            self._note(f"{user_place()} uses a tensor of an earlier stage beside the blocks ({name})")
        return result

    def _check_held(self, given: Sequence[torch.Tensor], function: str, cause: Exception | None = None) -> None:
        """Refuse the use of a parameter or buffer that only another stage has: its gradient could not come there."""
        absent = {id(tensor) for tensor in given if tensor.is_meta} if self._live else set()
        if not absent or self._module is None:
            return
        named = chain(self._module.named_parameters(), self._module.named_buffers())
        found = next((name for name, tensor in named if id(tensor) in absent), None)
        if found is not None:
            raise LayoutError(
                f"{user_place()} uses {found} outside of its module ({function}), and only another stage of the "
                "pipeline has it: put that use into a module that has the same parameter (head.weight = "
                "embedding.weight), or use another layout"
            ) from cause

    def _has_zeros(self, leaves: Sequence[object]) -> bool:
        return bool(self._zeros) and any(isinstance(t, torch.Tensor) and _key(t) in self._zeros for t in leaves)

    def _note(self, what: str) -> None:
        self.wrong = self.wrong or what


def valued(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments whose values matter."""
    if name in _LIKE:
        return pytree.tree_leaves((args[1:], dict(kwargs)))
    return pytree.tree_leaves(args[:1]) if name in _AS else pytree.tree_leaves((args, dict(kwargs)))


def _key(tensor: torch.Tensor) -> object:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except NotImplementedError:  # a sparse one
        return WeakIdRef(tensor)


def user_place() -> str:
    """The line that runs, `file.py:12`, of code that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while any(Path(frame.f_code.co_filename).is_relative_to(one) for one in LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
