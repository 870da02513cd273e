"""What placement, the modules of one process on several devices, asks of a Layout."""

from collections.abc import Mapping

from allranks.errors import LayoutError

_ONE_DEVICE = "each of its processes is one device"
_REASONS = {
    **dict.fromkeys(("dp_shard", "tp", "cp", "pp", "ep"), _ONE_DEVICE),
    "sharding": "it shares out the parameters of one device",
    "offload": "it moves what one device keeps",
}


def devices_named(rules: Mapping[str, str]) -> int:
    """GPUs that a process needs for its rules, which number them from 0 in each; 1 where they name none."""
    numbers = [int(number) for device in rules.values() if (number := device.removeprefix("cuda:")).isdecimal()]
    return max(numbers, default=0) + 1


def refuse_beside_placement(differing: Mapping[str, object]) -> None:
    """Whole copies alone stand around a process with several devices.

    Args:
        differing: what of a Layout is not its default.

    Raises:
        LayoutError: another axis or mode is among it.
    """
    for name, because in _REASONS.items():
        if name in differing:
            raise LayoutError(
                f"{name}={differing[name]} with placement: {because}, and placement takes several; leave one of them, "
                "or use placement,dp_replicate=N (DDP around it)"
            )
