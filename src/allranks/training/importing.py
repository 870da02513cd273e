"""A foreign model as a checkpoint of a Task: compared with what `model()` makes, and written only where it is that."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import nn

from allranks.checkpointing.checkpoint import Checkpoint, Header
from allranks.checkpointing.parts import Parts
from allranks.checkpointing.portion import place_of
from allranks.checkpointing.save import save
from allranks.errors import CheckpointError
from allranks.parameter_map import Box, Entry
from allranks.task import Task
from allranks.users_code import users_code

RUN = "imported"

What = Literal["missing", "extra", "reshaped", "retyped", "untied"]


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that the file and the model do not have in common.

    Attributes:
        name: as the model calls it, or the file where the model does not.
        what: the file has none, the model has none, another shape, another type; or the model has one tensor under two
            names and the file two.
        file: type and shape there; "" where there is none.
        model: likewise.
    """

    name: str
    what: What
    file: str
    model: str

    def to_json(self) -> dict[str, str]:
        """One JSON object."""
        return asdict(self)


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """What a file has of a model.

    Attributes:
        differences: missing, extra and reshaped ones first.
        values: every tensor of the model, in its own type, under its name; whole where nothing differs but types.
        aliases: names of tied tensors -> the name under which it is stored.
    """

    differences: tuple[Difference, ...]
    values: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]

    def fits(self, *, cast: bool) -> bool:
        """Whether it is this model; `cast`: in whatever types."""
        return all(cast and one.what == "retyped" for one in self.differences)


def compare_with(task: Task, found: Mapping[str, torch.Tensor]) -> Fit:
    """What a file's tensors have in common with the Task's model; several models are called `which.name`."""
    wanted = _state_of(task)
    names_of: dict[int, str] = {}
    aliases = {name: first for name, own in wanted.items() if (first := names_of.setdefault(id(own), name)) != name}
    differences: list[Difference] = []
    values: dict[str, torch.Tensor] = {}
    for name, own in wanted.items():
        if name in aliases:
            differences += _compare_tied(name, found.get(name), found.get(aliases[name]))
            continue
        tied = [alias for alias, first in aliases.items() if first == name]
        tensor = next((found[one] for one in (name, *tied) if one in found), None)
        if tensor is None:
            differences.append(Difference(name, "missing", "", _kind(own)))
        elif tensor.shape != own.shape:
            differences.append(Difference(name, "reshaped", _kind(tensor), _kind(own)))
        else:
            values[name] = tensor.to(own.dtype)
            if tensor.dtype != own.dtype:
                differences.append(Difference(name, "retyped", _kind(tensor), _kind(own)))
    differences += [Difference(name, "extra", _kind(found[name]), "") for name in found if name not in wanted]
    differences.sort(key=lambda one: one.what == "retyped")
    return Fit(tuple(differences), values, aliases)


def write_import(fit: Fit, directory: Path) -> Checkpoint:
    """Write `directory`/step-00000000, which `allranks.load` and the commands about checkpoints take.

    Raises:
        CheckpointError: it exists already, or cannot be written.
    """
    header = Header(RUN, 1, "single", 0, 0)
    place = place_of(directory, header, RUN)
    if place.target.exists():
        raise CheckpointError(f"{place.target} exists already, and is left as it is: name another directory")
    shutil.rmtree(place.temporary, ignore_errors=True)  # of an import that was killed
    parts: Parts = [
        (Entry(f"model.{name}", tuple(value.shape), _type(value), Box.whole(tuple(value.shape)), (0,)), value)
        for name, value in fit.values.items()
    ]
    return save(
        directory,
        header=header,
        parts=parts,
        aliases={f"model.{alias}": f"model.{name}" for alias, name in fit.aliases.items()},
        state={},
        group=None,
        rank=0,
        world_size=1,
        token=RUN,
    )


def _state_of(task: Task) -> dict[str, torch.Tensor]:
    """What a checkpoint of the Task's model holds, by name; the same tensor twice where it is tied."""
    with torch.random.fork_rng(devices=()), users_code(f"{type(task).__name__}.model() raised"):
        built = task.model()
    modules = {"": built} if isinstance(built, nn.Module) else dict(built)
    return {
        f"{which}.{name}" if which else name: tensor
        for which, module in modules.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }


def _compare_tied(name: str, own: torch.Tensor | None, first: torch.Tensor | None) -> list[Difference]:
    if own is None or first is None or (own.shape == first.shape and torch.equal(own, first.to(own.dtype))):
        return []
    return [Difference(name, "untied", _kind(own), "the same tensor as another name's")]


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(tensor: torch.Tensor) -> str:
    return f"{_type(tensor)}{list(tensor.shape)}"
