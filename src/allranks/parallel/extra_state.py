"""What a module keeps beside its tensors, by torch's `get_extra_state()`: it is no part of a checkpoint."""

from torch import nn

from allranks.verdict import Decision

KEY = "_extra_state"  # torch's own, at the end of the names in a state_dict


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """Key in `module.state_dict()` -> the part of it that has extra state."""
    return {
        f"{name}.{KEY}" if name else KEY: part
        for name, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def tell_extra_state(which: str, module: nn.Module, decisions: list[Decision]) -> None:
    """Say at the start that a checkpoint will not keep it. `which`: the model's name; "" for a single one."""
    found = extra_states(module)
    if not found:
        return
    kinds = ", ".join(sorted({type(part).__name__ for part in found.values()}))
    name = f"model {which}" if which else "the model"
    what = f"warning: the extra state of {len(found)} module(s) of {name} is not kept in checkpoints"
    because = f"{kinds} gives it by get_extra_state(), and a checkpoint has tensors: keep in buffers what must go on"
    decisions.append(Decision(what, because))
