"""Uses of a parameter that tp has cut, outside of its module: code that computes with a part as if it were the whole.

A head that is `F.linear(x, self.embedding.weight)` gets the rows of this rank's words. Its own module computes with
them as the others do; the line that takes them beside it does not. Whether that changes what is computed is for the
comparison with the whole model to say (stepping/uncompared.py): `0.0 * weight.sum()` changes nothing.
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

from allranks.errors import AllranksError, LayoutError
from allranks.parallel.dependence import user_place, valued
from allranks.parallel.spread import Spread

_TORCH = Path(torch.__file__).parent
_FORWARDED = {_TORCH / name for name in ("functional.py", "nn/functional.py", "overrides.py", "_tensor.py")}
_OURS = Path(__file__).parent.parent


@contextmanager
def uses_of_parts(spread: Spread) -> Iterator[None]:
    """Inside, such uses that lead to a gradient are in `spread.part_uses`, and a note on what is raised after them.

    Raises:
        LayoutError: torch refuses one, on every rank of tp, which run the same code: line, parameter and next move.
    """
    if spread.mesh.layout.tp == 1:
        yield
        return
    group = spread.mesh.group("tp")
    names = [name for name in spread.map if group in spread.cut_over.get(id(spread.tensors[name]), ())]
    try:
        with _Uses(spread, names):
            yield
    except AllranksError:
        raise
    except Exception as error:
        if spread.part_uses:
            error.add_note(f"allranks: {describe_uses(spread)}")
        raise
    finally:
        spread.part_uses.clear()


def describe_uses(spread: Spread) -> str:
    """Those that were found, and the next move; "" where there are none."""
    if not spread.part_uses:
        return ""
    lines = " and ".join(f"{place} uses {name}" for place, name in spread.part_uses.items())
    module = next(iter(spread.part_uses.values())).rpartition(".")[0]
    return (
        f"{lines} outside of its module, and each rank of tp={spread.mesh.layout.tp} has a part of it: make that use a "
        "module with the same parameter (head.weight = embedding.weight) and the same rule, or give "
        f'{module} the rule "replicate" (hints().tensor, world.parallelize(tensor=))'
    )


@final
class _Uses(TorchFunctionMode):
    def __init__(self, spread: Spread, names: Sequence[str]) -> None:
        super().__init__()
        self._spread = spread
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
            if self._note(given):
                raise LayoutError(describe_uses(self._spread)) from error
            raise
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad]
        # What returns the parameter itself (requires_grad_, clamp_) has computed nothing with it.
        if any(all(one is not same for same in given) for one in made):
            self._note(given)
        return result

    def _note(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether it is such a use, which is kept then."""
        if not given or not _is_users():
            return False
        # A sharded layout puts others in their place for a forward.
        used = {id(one) for one in given}
        found = next((full for owner, name, full in self._owners if id(owner._parameters.get(name)) in used), None)
        if found is not None:
            self._spread.part_uses.setdefault(user_place(), found)
        return found is not None


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
