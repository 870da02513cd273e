"""An own loop as a value: the functions that `allranks.verify` was given, or that a file defines."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from allranks.errors import DataError, TaskError
from allranks.task import TaskSpec
from allranks.task_loading import load_module

NEEDED = ("build", "step", "data")


@final
@dataclass(frozen=True)
class Program:
    """An own loop.

    Attributes:
        build: (distributed) -> (model, optimizer); modules may be a dict of them, optimizers too.
        step: (model, optimizer, batches) -> loss: one optimizer step over this process's micro-batches.
        data: what each step is fed. Either a list of global batches, one a step, each a tensor, tuple or dict of
            tensors whose first dim counts samples: with N processes each gets a consecutive share of near-equal size,
            one process gets all; or a function (rank, world_size) -> an iterable of steps, each a list of this rank's
            micro-batches, where (0, 1) gives what one device gets. Where it takes a third argument (`first_step`, or
            one without a default), that is the number of steps that are done: a resumed run is given what comes after
            them, by the program's own skipping.
        micro_batches: into how many micro-batches a share of a list is cut.
        evaluate: (model, batches) -> {name: value}, or None; run on every process after the last step. A process that
            leaves it to the others returns None; a name that ranks report and one device does not is a finding.
        validation: what it is measured on: one global batch, or a function (rank, world_size) -> batches.
        save, load: (model, optimizer, folder) -> None, on every process, or None; `load` gets what `build` has made
            anew. Of four steps and more there are two saves into one folder, the second after a load of the first.
        state: (model, optimizer) -> {name: tensor or number} of what else has to be equal, such as an average of the
            parameters; or None.
    """

    build: Callable[[bool], tuple[Any, Any]]
    step: Callable[[Any, Any, list[Any]], Any]
    data: Any
    micro_batches: int = 1
    evaluate: Callable[[Any, Any], Mapping[str, Any]] | None = None
    validation: Any = None
    save: Callable[[Any, Any, Path], object] | None = None
    load: Callable[[Any, Any, Path], object] | None = None
    state: Callable[[Any, Any], Mapping[str, Any]] | None = None

    def steps(self, rank: int, world_size: int, first: int = 0) -> Iterator[list[Any]]:
        """The micro-batches of each step from `first` on, on this rank; [] where it has none."""
        if callable(self.data):
            skips = _skips(self.data)
            steps = _iterate(self.data(rank, world_size, *([first] if skips else [])), "data(rank, world_size)")
            for batches in steps if skips else islice(steps, first, None):
                if not isinstance(batches, list | tuple):
                    raise DataError(f"a step of data(rank, world_size) is a {_kind(batches)}: give a list of batches")
                yield list(batches)
            return
        for batch in islice(_iterate(self.data, "data"), first, None):
            yield cut(_share(batch, rank, world_size), self.micro_batches)

    def too_small(self, num_steps: int, world_size: int) -> str:
        """Which step of a list has fewer samples than ranks, in words; "" where none has, and of a function."""
        for step, batch in enumerate(islice([] if callable(self.data) else self.data, num_steps)):
            if (size := num_samples(batch)) < world_size:
                samples = f"{size} sample" if size == 1 else f"{size} samples"
                return f"step {step} of data has {samples}, for {world_size} processes: some have none"
        return ""

    def leaves_out(self, num_steps: int, world_size: int) -> str:
        """Which step gives a rank no sample and one device some, in words; "" where none does. Calls `data` anew."""
        whole = [_has_samples(batches) for batches in islice(self.steps(0, 1), num_steps)]
        ranks = [
            [_has_samples(batches) for batches in islice(self.steps(rank, world_size), num_steps)]
            for rank in range(world_size)
        ]
        for step in (step for step, some in enumerate(whole) if some):
            out = [str(rank) for rank, own in enumerate(ranks) if not any(own[step : step + 1])]
            if out:
                return f"step {step} of data has samples, but none for rank {', '.join(out)} of {world_size} processes"
        return ""

    def evaluation_batches(self, rank: int, world_size: int) -> list[Any]:
        """What this rank measures on."""
        if callable(self.validation):
            return list(_iterate(self.validation(rank, world_size), "validation(rank, world_size)"))
        return [] if self.validation is None else cut(_share(self.validation, rank, world_size), 1)


def cut(batch: Any, number: int) -> list[Any]:
    """`batch` in up to `number` consecutive parts of near-equal size, none of them empty."""
    number = min(number, num_samples(batch))
    return [_share(batch, index, number) for index in range(number)]


def num_samples(batch: Any) -> int:
    """The common length of the tensors of a batch. Raises DataError where they have none."""
    lengths = _lengths(batch)
    if len(lengths) != 1:
        what = f"tensors of lengths {sorted(lengths)}" if lengths else "no tensor"
        raise DataError(f"a global batch of data holds {what}: give tensors whose first dim counts the samples")
    return int(lengths.pop())


def _has_samples(batches: Sequence[Any]) -> bool:
    """Whether not all tensors of a step have length 0."""
    return any(_lengths(batch) != {0} for batch in batches)


def _lengths(batch: Any) -> set[int]:
    return {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()}


def _share(batch: Any, index: int, number: int) -> Any:
    def part(leaf: Any) -> Any:
        return leaf.tensor_split(number)[index] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    num_samples(batch)
    return pytree.tree_map(part, batch)


def merge(batches: Sequence[Any]) -> Any | None:
    """All samples of some batches as one, or None where their tensors do not fit behind each other."""
    try:
        flat = [pytree.tree_flatten(batch) for batch in batches]
        if any(spec != flat[0][1] for _, spec in flat):
            return None
        leaves = [list(some) for some in zip(*(leaves for leaves, _ in flat), strict=True)]
        whole = [torch.cat(some) if isinstance(some[0], torch.Tensor) and some[0].dim() else some[0] for some in leaves]
        return pytree.tree_unflatten(whole, flat[0][1])
    except (RuntimeError, ValueError, IndexError):
        return None


def cast_floats(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating tensors in `dtype`."""
    if dtype is None:
        return batch
    return pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, batch
    )


def shuffled(batch: Any, seed: int) -> Any:
    """The same samples in another order."""
    order = order_of(batch, seed)
    if order is None:
        return batch
    return pytree.tree_map(lambda leaf: leaf[order] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, batch)


def order_of(batch: Any, seed: int) -> torch.Tensor | None:
    """The places that `shuffled` takes the samples from; None where it leaves them as they are."""
    lengths = _lengths(batch)
    if len(lengths) != 1:
        return None
    return torch.randperm(lengths.pop(), generator=torch.Generator().manual_seed(seed))


def in_order(rows: Sequence[int], order: torch.Tensor | None) -> list[int]:
    """Digests of samples, as `order_of` of their batch has put these."""
    return list(rows) if order is None or len(order) != len(rows) else [rows[place] for place in order.tolist()]


def call(model: torch.nn.Module, arguments: Any) -> Any:
    """The model's output for a tuple or dict of arguments."""
    return model(**arguments) if isinstance(arguments, Mapping) else model(*arguments)


def reported(value: Any, word: str) -> dict[str, Any]:
    """By name, what a program's `evaluate` or `state` returns; nothing of a rank that leaves it to the others.

    Raises TaskError where it is something else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise TaskError(
            f"{word} returns a {_kind(value)}: return {{name: value}}, or None on a rank that reports nothing"
        )
    return {str(name): held for name, held in (value or {}).items()}


def program_of(module: ModuleType, name: str) -> Program:
    """What a user's file defines. Raises TaskError where something is missing or is no function."""
    missing = [word for word in NEEDED if not hasattr(module, word)]
    if missing:
        raise TaskError(
            f"{name} defines no {' and no '.join(missing)}: an own loop is verified by build(distributed), "
            "step(model, optimizer, batches) and data"
        )
    found = {field.name: getattr(module, field.name) for field in fields(Program) if hasattr(module, field.name)}
    for word in ("build", "step", "evaluate", "save", "load", "state"):
        if word in found and found[word] is not None and not callable(found[word]):
            raise TaskError(f"{word} in {name} is a {_kind(found[word])}: expected a function")
    for word, needs in (("build", 1), ("step", 3)):
        _check_arguments(found[word], word, needs, name)
    if ("save" in found) != ("load" in found):
        raise TaskError(f"{name} defines only one of save and load: a resume is verified by both")
    return Program(**found)


def _takes(function: Callable[..., Any], number: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(number))
    except (TypeError, ValueError):
        return False
    return True


def _skips(data: Callable[..., Any]) -> bool:
    """Whether it takes the number of steps that are done: as its third argument, and not one of the program's own.

    Such a one has a default and another name than `first_step`.
    """
    if not _takes(data, 3):
        return False
    third = [*inspect.signature(data).bind(*range(3)).arguments][-1]
    parameter = inspect.signature(data).parameters[third]
    return parameter.default is inspect.Parameter.empty or third == "first_step"


def _check_arguments(function: Callable[..., Any], word: str, needs: int, name: str) -> None:
    if not _takes(function, needs):
        forms = {"build": "build(distributed)", "step": "step(model, optimizer, batches)"}
        raise TaskError(f"{word} in {name} cannot be called as {forms[word]}")


def load_program(spec: str) -> Program:
    """The own loop in a file."""
    parsed = TaskSpec.parse(spec)
    return program_of(load_module(parsed), parsed.file.name if parsed.file is not None else parsed.module)


def _iterate(value: Any, what: str) -> Iterable[Any]:
    if isinstance(value, torch.Tensor | Mapping) or not isinstance(value, Iterable):
        raise DataError(f"{what} is a {_kind(value)}: give one entry for each step, in a list")
    return value


def _kind(value: object) -> str:
    return type(value).__name__
