"""How many GPUs rules need, and what placement does not go with."""

import re

import pytest

from allranks.errors import LayoutError
from allranks.layout_placement import devices_named, refuse_beside_placement


@pytest.mark.parametrize(
    ("devices", "number"),
    [([], 1), (["cpu", "cpu:3"], 1), (["cuda"], 1), (["cuda:0", "cuda:2", "cpu"], 3), (["cuda:x"], 1)],
)
def test_devices_are_numbered_from_zero(devices: list[str], number: int) -> None:
    assert devices_named({f"part{index}": device for index, device in enumerate(devices)}) == number


def test_copies_and_block_modes_go_with_it_and_other_axes_do_not() -> None:
    refuse_beside_placement({"dp_replicate": 4, "recompute": "full", "kind": "placement", "batchnorm": "sync"})
    for name, value in {
        "dp_shard": 2,
        "tp": 2,
        "cp": 2,
        "pp": 2,
        "ep": 2,
        "sharding": "none",
        "offload": "all",
    }.items():
        with pytest.raises(LayoutError, match=f"^{name}={value} with placement: .*dp_replicate=N") as caught:
            refuse_beside_placement({"dp_replicate": 2, name: value})
        assert re.search("takes several; leave one of them", str(caught.value))
