"""What every process must have alike (law 11: no rank decides alone): code, settings, the data's length, the way taken.

Unequal code or settings would train on in silence, and unequal lengths leave some ranks in a step that others never
begin.
"""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.config import same_value
from allranks.errors import AllranksError, ConfigError, DataError, TaskError
from allranks.parallel.parting import describe_parting, first_difference, name_entered
from allranks.stepping.same_code import code_of, digest_of, find_other_code

NAMED = 3


def check_same_code(task: type, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare the code that every process runs; collective.

    Args:
        task: the class of the user's Task.
        group: all processes; None for one.
        device: where the group's backend wants its tensors.

    Raises:
        TaskError: on every rank, naming the first rank and the files and versions that differ from rank 0's.
    """
    if group is None:
        return
    code = code_of(task)
    if len(set(everyones(digest_of(json.dumps(code).encode()), group, device))) == 1:
        return  # of thousands of ranks that all are alike none says more
    error = find_other_code(everyones([socket.gethostname(), code], group, device))
    if error is not None:
        raise error


def check_same_start(
    settings: Mapping[str, object], num_samples: int | None, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compare what every process was given; collective.

    Args:
        settings: full key -> JSON value.
        num_samples: length of the training data; None where it does not say.
        group: all processes; None for one.
        device: where the group's backend wants its tensors.

    Raises:
        ConfigError: on every rank, naming the first rank and keys that differ from rank 0's.
        DataError: on every rank, naming the first rank whose dataset has another length.
    """
    error = find_difference(everyones([dict(settings), num_samples], group, device))
    if error is not None:
        raise error


def find_difference(told: Sequence[Sequence[Any]]) -> AllranksError | None:
    """The error for the first rank whose (settings, length) are not rank 0's."""
    first, length = told[0]
    for rank, (settings, other) in enumerate(told):
        differing = [key for key in {**first, **settings} if not same_value(first.get(key), settings.get(key))]
        if differing:
            named = differing[:NAMED]
            shown = ", ".join(f"{key} = {settings.get(key)!r} instead of {first.get(key)!r}" for key in named)
            more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
            return ConfigError(
                f"rank {rank} was started with other settings than rank 0: {shown}{more}; give every process the same"
            )
        if other != length:
            return DataError(
                f"dataset('train') has {other} samples on rank {rank} and {length} on rank 0: every process has to see "
                "the same data; compare the copies on the hosts"
            )
    return None


def explain_divergence(
    path: Sequence[str], step: int, group: dist.ProcessGroup | None, device: torch.device, stage: int = 0
) -> TaskError:
    """The error for ranks whose forwards entered different units in step `step` (from 1), one for all; collective.

    Args:
        stage: this rank's place along pp.
    """
    return explain_paths(everyones([stage, list(path)], group, device), step)


def find_parted(told: Sequence[tuple[int, Sequence[str]]]) -> tuple[int, int] | None:
    """Two ranks of one stage that have entered different units, the first such; None where there are none.

    Args:
        told: by rank, its stage and what it has entered.
    """
    firsts: dict[int, int] = {}
    pairs = ((firsts.setdefault(stage, rank), rank) for rank, (stage, _) in enumerate(told))
    return next((pair for pair in pairs if told[pair[0]][1] != told[pair[1]][1]), None)


def explain_paths(told: Sequence[tuple[int, Sequence[str]]], step: int) -> TaskError:
    """The error for what the ranks' forwards have entered in step `step` (from 1), as of `find_parted`."""
    first, rank = find_parted(told) or (0, 0)
    one, other = told[first][1], told[rank][1]
    place = first_difference(one, other)
    entered = name_entered(one, place), name_entered(other, place)
    return TaskError(f"in step {step} the ranks ran different modules: {describe_parting((first, rank), entered)}")


def everyones(value: object, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """Every rank's JSON value, by rank, on every rank; collective."""
    parts = gather_bytes(json.dumps(value, default=str).encode(), group, device)
    whole = b"[" + b",".join(parts) + b"]"
    found: list[Any] = json.loads(broadcast_bytes(whole, group, device))
    return found


def on_any_rank(flag: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether it holds on one rank at least; collective. `group`: None for one process."""
    if group is None:
        return flag
    found = torch.tensor(float(flag), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found.item())
