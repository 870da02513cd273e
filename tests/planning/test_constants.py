"""Constants: which device gets which, and that there are few of them."""

import json
from dataclasses import replace

import pytest

from allranks.planning.catalog import device_names, find_device
from allranks.planning.constants import FILE, constants_of, constants_of_name
from tests.planning.profiles import cluster


def test_the_longest_name_wins() -> None:
    assert constants_of_name("h100-96g")[0] == "h100-96g"
    assert constants_of_name("h100-pcie")[0] == "h100"
    assert constants_of_name("toaster")[0] == ""


def test_at_most_a_handful_of_constants_is_fitted_for_a_device() -> None:
    table = json.loads(FILE.read_text())["devices"]
    fitted = {"matmul", "matmul_low", "attention", "flash1", "flash2", "memory", "inside", "between"}
    fitted |= {"base_seconds", "hop_seconds", "depth"}
    assert {name: fitted & set(row) for name, row in table.items() if len(fitted & set(row)) > 7} == {
        "default": fitted,  # what all others start from
        "cpu": fitted - {"flash1", "inside", "between"},  # a guess, which no run has seen
    }


@pytest.mark.parametrize("name", device_names())
def test_every_device_of_the_catalog_gets_shares_between_0_and_1(name: str) -> None:
    got = constants_of(find_device(name).device)
    shares = (got.matmul, got.matmul_low, got.attention, got.flash1, got.flash2, got.memory, got.inside, got.between)
    assert all(0.0 < share <= 1.0 for share in shares)


def test_an_unknown_device_takes_its_measured_rate() -> None:
    device = replace(cluster().device, matmul_flops={"bfloat16": 55e12})
    assert constants_of(device).matmul == pytest.approx(0.55)
    assert constants_of(cluster().device).matmul == constants_of_name("")[1].matmul


def test_each_kernel_of_attention_has_its_own_share() -> None:
    """FlashAttention-2 on an H100: 335 of 989 TFLOP/s, causal, heads of 128 (2407.08608, figure 5); 1 is far behind."""
    h100 = constants_of(find_device("h100").device)
    assert h100.attention_share("vendor") == h100.attention > h100.attention_share("flash2")
    assert h100.attention_share("flash2") == h100.flash2 == pytest.approx(335 / 989, abs=0.005)
    assert h100.attention_share("flash1") == h100.flash1 < h100.flash2


def test_what_was_measured_on_this_machine_is_what_is_reached() -> None:
    device = replace(cluster().device, name="a100-80g", matmul_flops={"bfloat16": 70e12}, measured=True)
    got = constants_of(device)
    assert got.matmul == pytest.approx(0.7)
    assert (got.memory, got.inside, got.between) == (1.0, 1.0, 1.0)
