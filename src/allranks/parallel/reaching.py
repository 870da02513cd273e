"""Which parameters of a sharded unit a backward reaches, compared before they are reduced.

FSDP2 reduces what has a gradient, laid end to end. Ranks that take different branches inside of one unit would add one
parameter's gradient to another's, without a word where both are equally large; gloo ends the process where they are
not. So the path says whose gradients each unit reduces. And over gloo a rank that has not all of them asks the others
first, over a line of its own: one that has all of them is waited for there until `parting` finds out. Copies of the
parts compare every unit: who waits for other copies does so inside of FSDP2, where nobody finds out anything.
"""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import TaskError
from allranks.parallel.held_back import parameter_groups, trainable_of
from allranks.parallel.parting import describe_parting
from allranks.parallel.path import Path, path_digest

WORDS_BYTES: Final = 1024
"""So much of what a rank has to say is sent, behind a digest of all of it."""


def follow_reductions(
    module: nn.Module, path: Path, line: dist.ProcessGroup | None, *, copies: bool, apart: Collection[nn.Module] = ()
) -> None:
    """Let every unit of `module` note in `path` whose gradients it reduces.

    Args:
        line: the ranks of a unit, over gloo and used for nothing else: those that lack gradients compare, and raise
            TaskError where they lack different ones. None: nobody asks, and the step's agreement finds out.
        copies: whether there are several of each part, on other ranks of the line: then those that lack nothing
            compare, too.
        apart: units in it that other ranks reduce.
    """
    others = set(map(id, parameter_groups(apart)))
    for group in parameter_groups([module]):
        if id(group) in others:
            continue
        group.post_backward = _following(group.post_backward, group, path, line, copies)


def _following(
    post_backward: Callable[..., Any], group: Any, path: Path, line: dist.ProcessGroup | None, copies: bool
) -> Callable[..., Any]:
    @wraps(post_backward)
    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = trainable_of(group) if group.reduce_grads else []
        if wanted:
            lacking = [parameter for parameter in wanted if not _has_gradient(parameter)]
            words = describe_reduction(group._module_fqn or "", [str(p._param_fqn) for p in lacking], len(wanted))
            path.note(words)
            # FSDP2 passes by what has no gradient, and was not entered, once the backward is over: it waits for nobody.
            waits = len(lacking) < len(wanted) or group._training_state.name != "IDLE"
            if line is not None and (lacking or copies) and waits:
                compare_reductions(words, line, path)
        return post_backward(*args, **kwargs)

    return call


def _has_gradient(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def describe_reduction(unit: str, lacking: list[str], num_parameters: int) -> str:
    """What a unit is about to reduce, in words that are not the same for other parameters."""
    reduced = f"the gradients of {unit or 'the model'}"
    if not lacking:
        return reduced
    return f"{reduced} without {', '.join(lacking) if len(lacking) < num_parameters else 'any'}"


def compare_reductions(words: str, line: dist.ProcessGroup, path: Path) -> None:
    """Tell the ranks of `line` what this one is about to reduce; collective among those that are to compare.

    Raises:
        TaskError: on every rank: two of them, and what each of these would reduce.
    """
    digest = torch.tensor([path_digest([words])]).view(torch.uint8)
    told = words.encode()[:WORDS_BYTES].ljust(WORDS_BYTES)
    own = torch.cat([digest, torch.frombuffer(bytearray(told), dtype=torch.uint8)])
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(line))]
    # Past torch's dispatcher: what looks there at the collectives of a step finds those of the model alone.
    backend: Any = line._get_backend(own.device)
    path.wait(backend.allgather([everyones], [own]))
    other = next((index for index, one in enumerate(everyones) if not torch.equal(one, everyones[0])), None)
    if other is not None:
        ranks = dist.get_process_group_ranks(line)
        first, second = (
            bytes(everyones[index][len(digest) :].tolist()).decode(errors="ignore").rstrip() for index in (0, other)
        )
        parting = describe_parting((ranks[0], ranks[other]), (first, second))
        raise TaskError(f"the ranks ran different modules: {parting}")
