"""Constants: which device gets which, and that there are few of them."""

import json
from dataclasses import replace

import pytest

from allranks.planning.catalog import device_names, find_device
from allranks.planning.constants import FILE, FOUND_AT, TRAINED, constants_of, constants_of_name
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


def test_a_chip_with_fewer_links_has_the_constants_of_the_chip() -> None:
    assert constants_of(find_device("a800").device) == constants_of(find_device("a100-80g").device)
    assert constants_of(find_device("h800").device) == constants_of(find_device("h100").device)


def test_an_unknown_device_reaches_a_share_of_the_best_product_that_somebody_measured() -> None:
    unknown = constants_of(cluster().device)
    got = constants_of(replace(cluster().device, matmul_flops={"bfloat16": 55e12}))
    assert got.matmul == pytest.approx(TRAINED * 0.55) and unknown.matmul == constants_of_name("")[1].matmul
    assert got.flash2 / got.matmul == pytest.approx(unknown.flash2 / unknown.matmul)
    assert got.attention / got.matmul == pytest.approx(unknown.attention / unknown.matmul)
    assert got.family == "", "nobody has compared it with runs: its interval stays wide"
    clocked = constants_of(replace(cluster().device, matmul_flops={"bfloat16": 120e12}))
    assert clocked.matmul == 1.0, "a higher clock than the data sheet's"


def test_around_a_kernel_of_attention_less_is_left_on_long_sequences() -> None:
    a100 = constants_of(find_device("a100-80g").device)
    shares = [a100.attention_share("flash2", positions) for positions in (0, 2048, FOUND_AT, 32768, 1_000_000)]
    assert shares[:3] == [a100.flash2] * 3
    assert a100.flash2 < shares[3] < shares[4] < a100.flash2_long
    assert shares[3] == pytest.approx(0.4893, abs=1e-3)
    assert a100.attention_share("vendor", 1_000_000) == a100.attention
    h100 = constants_of(find_device("h100").device)
    assert h100.attention_share("flash2", 1_000_000) == h100.flash2, "where nothing says that it is another"


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
