"""Uses of a parameter that tp has cut, outside of its module: code that computes with a part as if it were the whole.

A head that is `F.linear(x, self.embedding.weight)` gets the rows of this rank's words. Its own module computes with
them as the others do; the line that takes them beside it does not, whatever comes of it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.dependence import user_place, valued
from allranks.parallel.spread import Spread

_TORCH = Path(torch.__file__).parent
_FORWARDED = {_TORCH / name for name in ("functional.py", "nn/functional.py", "overrides.py", "_tensor.py")}
_OURS = Path(__file__).parent.parent


@contextmanager
def uses_of_parts(spread: Spread) -> Iterator[None]:
    """Inside, such a use is refused: one that leads to a gradient, or that torch refuses with words of its own.

    Raises:
        LayoutError: naming line, parameter and next move; on every rank of tp, which run the same code.
    """
    if spread.mesh.layout.tp == 1:
        yield
        return
    group = spread.mesh.group("tp")
    names = [name for name in spread.map if group in spread.cut_over.get(id(spread.tensors[name]), ())]
    with _Uses(spread, names):
        yield


@final
class _Uses(TorchFunctionMode):
    def __init__(self, spread: Spread, names: Sequence[str]) -> None:
        super().__init__()
        self._tp = spread.mesh.layout.tp
        # By what a module holds: one that is wrapped has another name among the modules than in the map.
        wanted = {id(spread.tensors[name]): name for name in reversed(names)}
        self._owners = [
            (module, name, wanted[id(parameter)])
            for which in spread.modules
            for module in spread.bare(which).modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in wanted
        ]

    def __torch_function__(
        self, function: Callable[..., Any], kinds: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = valued(getattr(function, "__name__", ""), args, kwargs or {})
        given = [one for one in given if isinstance(one, torch.nn.Parameter)]
        try:
            result = function(*args, **(kwargs or {}))
        except Exception as error:
            self._check(given, error)
            raise
        if given and any(one.requires_grad for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)):
            self._check(given)
        return result

    def _check(self, given: Sequence[torch.Tensor], cause: Exception | None = None) -> None:
        if not given or not _is_users():
            return
        # A sharded layout puts others in their place for a forward.
        used = {id(one) for one in given}
        found = next((full for owner, name, full in self._owners if id(owner._parameters.get(name)) in used), None)
        if found is not None:
            raise LayoutError(
                f"{user_place()} uses {found} outside of its module, and each rank of tp={self._tp} has a part of it: "
                f"make that use a module with the same parameter (head.weight = embedding.weight) and the same rule, "
                f'or give {found.rpartition(".")[0]} the rule "replicate" (hints().tensor, world.parallelize(tensor=))'
            ) from cause


def _is_users() -> bool:
    """Whether the operation stands in a line that is neither torch's nor ours."""
    frame = sys._getframe(3)
    while _is_passed_on(frame) and frame.f_back is not None:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return not any(path.is_relative_to(one) for one in (_TORCH, _OURS))


def _is_passed_on(frame: FrameType) -> bool:
    """Whether it is no line that computes: torch hands the operation on from there, or another mode looks on."""
    return Path(frame.f_code.co_filename) in _FORWARDED or frame.f_code.co_name == "__torch_function__"
