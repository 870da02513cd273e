"""How many parameters a model has, known before it is trained: model() runs once more, and takes next to nothing."""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from allranks.errors import TaskError
from allranks.task import Task

LARGE = 2**16
"""Elements from which a tensor is left unfilled when parameters are counted."""
FILLS = {
    *("normal_", "log_normal_", "trunc_normal_", "kaiming_normal_", "xavier_normal_", "orthogonal_", "sparse_"),
    *("uniform_", "kaiming_uniform_", "xavier_uniform_", "constant_", "fill_", "ones_", "zeros_", "zero_", "copy_"),
    *("bernoulli_", "exponential_", "mul_", "add_", "clamp_"),
}
MAKERS = frozenset((torch.randn, torch.rand, torch.zeros, torch.ones))


def count_parameters(task: Task) -> int:
    """Of all models of the Task, shared ones once; no memory is taken, and what model() prints is not shown twice."""
    return count_in(build_unfilled(task))


def count_in(modules: Iterable[nn.Module], *, trained: bool = False) -> int:
    """Elements of their parameters, shared ones once; `trained`: of those that get gradients."""
    found = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in found.values() if parameter.requires_grad or not trained)


def build_unfilled(task: Task) -> list[nn.Module]:
    """The models of the Task, whose large tensors hold no values and take no memory.

    Files of weights that `torch.load` reads are mapped: of what is copied into parameters nothing is read.
    """
    with _Unfilled(), _files_mapped():
        return build_filled(task)


def build_filled(task: Task) -> list[nn.Module]:
    """The models of the Task once more: what is said meanwhile is not shown, and no random number of ours is drawn."""
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.random.fork_rng(devices=()):
            built = task.model()
    return list(built.values()) if isinstance(built, dict) else [built]


@contextlib.contextmanager
def device_untouched() -> Iterator[None]:
    """Whoever would initialise CUDA raises instead: everything that does so goes through this function of torch."""
    kept = torch.cuda._lazy_init

    def refuse() -> None:
        raise TaskError("model() uses a GPU while it builds")

    torch.cuda._lazy_init = refuse
    try:
        yield
    finally:
        torch.cuda._lazy_init = kept


@contextlib.contextmanager
def _files_mapped() -> Iterator[None]:
    """`torch.load` of a path maps the file where it can: older formats and other objects are read."""
    kept = torch.load

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike) or "mmap" in kwargs:
            return kept(f, *args, **kwargs)
        try:
            return kept(f, *args, mmap=True, **kwargs)
        except RuntimeError:
            return kept(f, *args, **kwargs)

    torch.load = load
    try:
        yield
    finally:
        torch.load = kept


@final
class _Unfilled(TorchFunctionMode):
    """Large tensors are allocated and never written, so that the system gives them no memory, and none takes time.

    Not the meta device: the first model built there makes torch import its compiler, which takes about a second of
    processor time; and a model() that reads a value while it builds works here.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return a large tensor as it is in the place of filling it."""
        given = dict(kwargs or {})
        if func in MAKERS and "out" not in given:
            made = torch.empty(*args, **{name: value for name, value in given.items() if name != "generator"})
            if made.numel() >= LARGE:
                return made
        filled = args[0] if args else given.get("tensor")
        if isinstance(filled, torch.Tensor) and filled.numel() >= LARGE and getattr(func, "__name__", "") in FILLS:
            return filled
        return func(*args, **given)
