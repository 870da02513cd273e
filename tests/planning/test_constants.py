"""Constants: which device gets which, and that there are few of them."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from allranks.planning.catalog import device_names, find_device
from allranks.planning.constants import FILE, FOUND_AT, TRAINED, Constants, constants_of, constants_of_name
from tests.planning.profiles import cluster

ROOT = Path(__file__).resolve().parents[2]


def test_the_longest_name_wins() -> None:
    assert constants_of_name("h100-96g")[0] == "h100-96g"
    assert constants_of_name("h100-pcie")[0] == "h100"
    assert constants_of_name("toaster")[0] == ""


def own_constants() -> dict[str, set[str]]:
    """Device family -> what the table gives it beyond data sheets, whatever it is called."""
    rows = json.loads(FILE.read_text())["devices"]
    return {name: set(row) - {"units"} for name, row in rows.items()}


def test_a_device_has_few_constants_of_its_own() -> None:
    own = own_constants()
    every = {field.name for field in fields(Constants)} - {"units", "family"}
    assert own.pop("default") == every - {"flash2_long"}, "what all others start from"
    assert own.pop("cpu") == every - {"flash1", "flash2_long", "inside", "between"}, "a guess, which no run has seen"
    a100 = {"matmul", "attention", "flash1", "flash2", "flash2_long", "base_seconds", "hop_seconds"}
    assert own.pop("a100") == a100
    assert all(3 <= len(names) <= 5 for names in own.values())


def test_the_page_counts_the_constants_as_the_table_has_them() -> None:
    page = (ROOT / "docs" / "explanation" / "planner.md").read_text()
    told = re.search(
        r"at most (\w+) constants of its own \(the A100, whose \w+ are (\w+) different figures; others have (\w+) to"
        r" (\w+)\)",
        page,
    )
    assert told is not None
    table, own = json.loads(FILE.read_text())["devices"], own_constants()
    figures = {table["a100"][name] for name in own["a100"]}
    others = [len(names) for name, names in own.items() if name not in ("default", "cpu", "a100")]
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
    counted = (len(own["a100"]), len(figures), min(others), max(others))
    assert told.groups() == tuple(words[number] for number in counted)
    named = re.split(r"\n\n(?!- )", page[told.start() :])[0]  # with the list that follows
    assert all(
        f"`{name}`" in named for name in set.union(*(own[name] for name in own if name not in ("default", "cpu")))
    )


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
