"""FSDP2's mixed precision, taken off: verify compares in float64, as if there were none, as it is with autocast.

Only that gradients are added up in a low precision stays, where the policy says so: that is a mistake (S37).
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from allranks.parallel.held_back import parameter_groups
from allranks.verifying.observation import modules_of
from allranks.verifying.program import Program
from allranks.verifying.update_state import built

LOW: Final = (torch.bfloat16, torch.float16)


def without_policies(program: Program) -> Program:
    """The program whose modules under fully_shard compute in the type of their parameters."""

    def build(distributed: bool) -> tuple[Any, Any]:
        model, optimizer = built(program.build(distributed))
        modules = modules_of(model).values()
        for member in (member for module in modules for member in module.modules()):
            if isinstance(member, FSDPModule):
                state: Any = member._get_fsdp_state()
                state._mp_policy = without_types(state._mp_policy)
        for group in parameter_groups(modules):
            group.mp_policy = without_types(group.mp_policy)  # types are taken from it in the first forward
        return model, optimizer

    return replace(program, build=build)


def without_types(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy that lowers nothing, but what gradients are added up in. Where it names no type for these, that is
    the type in which they are computed.
    """
    reduced = policy.reduce_dtype or policy.param_dtype
    return MixedPrecisionPolicy(reduce_dtype=reduced if reduced in LOW else None)
