"""The first call of a model whose layers or experts are cut, held against the whole one, where a loop makes it itself.

Under tp and ep a loop calls its model as ever, so that there is no moment before the first step at which a Task's
comparison (stepping/whole_check.py) could be made. It is made at the first call: all data-parallel ranks take the first
one's arguments, and in place of a loss there is a weighed sum of the outputs, whose gradients reach all that the loop's
own loss could reach. The loss itself gets whole tensors, and may speak with other processes, which rank 0 alone cannot.

Both are in evaluation mode.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from allranks.data.random_keys import generators_kept
from allranks.errors import LayoutError, TaskError
from allranks.parallel.compiled import uncompiled
from allranks.parallel.outputs import map_tensors
from allranks.parallel.spread import Spread
from allranks.parallel.tensor_uses import uses_of_parts
from allranks.stepping.alike import everyones
from allranks.stepping.flops import count_flops
from allranks.stepping.kept_state import state_kept
from allranks.stepping.passes import Arguments, Forward
from allranks.stepping.uncompared import UNCOMPARED, pass_uncompared
from allranks.stepping.whole_check import Asked, compare_whole
from allranks.task_loading import describe
from allranks.training.own.forward import OwnTask
from allranks.training.own.models import OwnModels, needs_run
from allranks.training.own.same_batch import is_alike, share_batch
from allranks.training.own.starts import Start
from allranks.verdict import Decision

SEED = 0
_KNOWN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = (torch.Tensor, nn.Parameter)  # a subclass has a working of its own
_LOWER = (torch.bfloat16, torch.float16)
_MESSAGES = ("c10d", "_c10d_functional", "c10d_functional")


class _UncomparableError(Exception):
    """Why the output that the model gave cannot be compared: the same on every rank."""


@final
class FirstCalls:
    """The first calls of a world's models.

    Args:
        decide: told what came of each.
    """

    def __init__(self, models: OwnModels, decide: Callable[[Decision], None]) -> None:
        self._models = models
        self._decide = decide
        self._hooks: dict[Spread, RemovableHandle] = {}

    def watch(self) -> None:
        """From here on the first call of each model that is cut, and has not been compared yet, is collective."""
        for spread in self._models.starts:
            if spread not in self._hooks and not needs_run(spread.mesh.layout):
                self._hooks[spread] = self._watch(spread)

    def end(self) -> None:
        """The first backward comes: say of each model that is left that it is not compared, and let its copy go."""
        for spread in [*self._models.starts]:
            if not needs_run(spread.mesh.layout):
                if (hook := self._hooks.pop(spread, None)) is not None:
                    hook.remove()
                del self._models.starts[spread]
                name = type(spread.bare()).__name__
                self._decide(pass_uncompared(spread, f"no call of {name} was seen before the first backward"))

    def _watch(self, spread: Spread) -> RemovableHandle:
        def meet(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():  # a function that was compiled around it: `end` says so
                return
            if spread in self._models.starts and self._counts(spread):
                self._hooks.pop(spread).remove()
                start = self._models.starts.pop(spread)
                self._decide(compare_call(spread, start, arguments, options))
                self._models.go_on()

        # A model that the loop compiles is called through its hooks.
        seen = torch.compiler.disable(meet) if "torch._dynamo" in sys.modules else meet
        return spread.modules[""].register_forward_pre_hook(seen, prepend=True, with_kwargs=True)

    def _counts(self, spread: Spread) -> bool:
        """Whether a call now is one that all ranks make: a trained model may be asked for samples by one rank alone."""
        return self._models.is_evaluating or torch.is_grad_enabled() or not spread.trainable()


def compare_call(spread: Spread, start: Start, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Decision:
    """Compare what is computed of a call's arguments, by place and by name; collective over the world.

    Nothing of it stays: state, generators and gradients are as before.

    Raises:
        LayoutError: on every rank, naming what differs.
    """
    pair = arguments, dict(options)
    if because := start.why_not(spread) or _why_not(pair, spread):
        return pass_uncompared(spread, because)
    name, whole = type(spread.bare()).__name__, start.whole.module
    with _undisturbed(spread):
        shared = _shared(pair, spread)
        outputs = _Outputs()
        forward = Forward(OwnTask(outputs.weigh, whole), spread, _as_given, partial(_call, whole))
        with _Lowest() as lowest:
            flops = count_flops(forward, shared, 1)
        told = {"what": f"the first call of {name}", "value": "weighted sum of the outputs"}
        try:
            found = compare_whole(forward, shared, SEED, flops, Asked(**told, strict=False, lowest=lowest.dtype))
        except _UncomparableError as error:
            spread.reshard()
            return pass_uncompared(spread, str(error))
        except Exception as error:
            if not isinstance(error, LayoutError):
                error.add_note(f"raised where the first call of {name} is compared, in evaluation mode")
            raise
    return outputs.tell(found)


def _why_not(pair: Any, spread: Spread) -> str:
    """Why these arguments are none to compare with, on every rank; "" where nothing speaks against it; collective."""
    leaves = [leaf for leaf in pytree.tree_leaves(pair) if not isinstance(leaf, _KNOWN)]
    other = next((leaf for leaf in leaves if type(leaf) not in _TENSORS or _is_special(leaf)), None)
    mine = "" if other is None else f"its forward gets {describe(other)}, of which no copies can be made for it"
    if told := next(filter(None, everyones(mine, dist.group.WORLD, spread.device)), ""):
        return told
    return "" if is_alike(pair, spread) else "processes call it with arguments of other kinds, or other numbers"


def _is_special(tensor: torch.Tensor) -> bool:
    return tensor.is_nested or tensor.layout is not torch.strided


@contextmanager
def _undisturbed(spread: Spread) -> Iterator[None]:
    """Nothing of what runs inside stays, and what surrounds the loop's call does not reach it: autocast, inference."""
    module = spread.bare()
    with ExitStack() as entered:
        entered.enter_context(uncompiled())
        entered.enter_context(uses_of_parts(spread))
        entered.enter_context(torch.inference_mode(False))
        for kind in {"cpu", spread.device.type}:
            # No cache: it would keep what a forward inside rounded, with the values before they are shaken.
            entered.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        entered.enter_context(generators_kept(module))
        entered.enter_context(state_kept(module))
        yield


def _shared(pair: Any, spread: Spread) -> Any:
    """The first data-parallel rank's arguments, apart from the loop's, none in a lower type; collective."""
    full = spread.precision.parameters

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach().clone()
        return found.to(full) if found.dtype in _LOWER else found

    shared = share_batch(pytree.tree_map_only(torch.Tensor, apart, pair), spread)
    # A forward may take gradients of what it gets.
    return pytree.tree_map(
        lambda own, one: one.requires_grad_(own.requires_grad) if isinstance(own, torch.Tensor) else one, pair, shared
    )


def _as_given(pair: object) -> Arguments:
    assert isinstance(pair, tuple)
    return pair


def _call(whole: nn.Module | None, module: Callable[..., object], pair: Arguments) -> object:
    """What a module gives for copies of the arguments, which it may write into; the whole one alone on its rank."""
    arguments, options = pytree.tree_map_only(
        torch.Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), pair
    )
    with _Alone() if module is whole else nullcontext():
        return module(*arguments, **options)


@final
class _Alone(TorchDispatchMode):
    """Inside, messages to other processes are refused: nobody would answer. Raises TaskError."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in _MESSAGES:
            raise TaskError(f"its forward speaks with other processes ({function.__name__.partition('.')[0]})")
        return function(*args, **(kwargs or {}))


@final
class _Lowest(TorchDispatchMode):
    """Notes in `dtype` a lower type that something inside computes in: autocast or a cast in the model's own code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype in _LOWER:
            self.dtype = found.dtype
        return found


@final
class _Outputs:
    """A number made of all that a model returns, in place of a loss."""

    def __init__(self) -> None:
        self._unseen: set[str] = set()

    def weigh(self, output: Any, batch: Any) -> torch.Tensor:
        """The sum of all finite values times fixed weights, and, without a gradient, that of their sizes.

        Weights have either sign, so that sums of gradients do not vanish where a layer normalises what it gives; the
        sizes keep rounding errors small beside the number. 0-dim, float64.

        Raises:
            _UncomparableError: there is no tensor of floating numbers.
        """
        found = list[torch.Tensor]()

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            if _is_special(tensor):
                self._unseen.add(type(tensor).__name__)
            elif tensor.is_floating_point() or tensor.is_complex():
                found.append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
            return tensor

        map_tensors(collect, output)
        others = [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, (torch.Tensor, *_KNOWN))]
        self._unseen |= {type(leaf).__name__ for leaf in others if not is_dataclass(leaf)}
        if not found:
            raise _UncomparableError(f"it returns {describe(output)}, in which no tensor of floating numbers is found")
        return torch.stack([_weighed(place, tensor).to(found[0].device) for place, tensor in enumerate(found)]).sum()

    def tell(self, found: Decision) -> Decision:
        """`found`, with what of the output it says nothing of."""
        if not self._unseen or found.what == UNCOMPARED:
            return found
        unseen = ", ".join(sorted(self._unseen))
        return replace(found, because=f"{found.because}; not looked at in the output: {unseen}")


def _weighed(place: int, values: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float32)
    products = values.nan_to_num(0.0, 0.0, 0.0) * weights.to(values)
    return products.sum(dtype=torch.float64) + products.detach().abs().sum(dtype=torch.float64)
