"""How often what fails: by name, as a number, from a file."""

from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.rehearsing.failure_rates import NAMED, find_failures, read_failures
from allranks.simulation import Scope

FILE = """
rack_nodes = 4
source = "our own log of 2026"
[[component]]
name = "GPU"
per_1000_node_days = 2.5
repair_hours = 12
[[component]]
name = "switch"
per_1000_node_days = 0.1
scope = "rack"
repair_hours = 2
[stragglers]
per_1000_node_days = 1.0
slowdown = 0.2
hours = 3
"""


def test_llama3_is_the_419_interruptions_of_its_paper() -> None:
    model = NAMED["llama3"]

    assert model.per_1000_node_days * 2048 * 54 / 1000 == pytest.approx(419)
    assert model.per_1000_node_days == pytest.approx(3.79, abs=0.005)
    assert {part.scope for part in model.components} == {Scope.PROCESS, Scope.NODE, Scope.RACK}


@pytest.mark.parametrize(("devices", "rack_nodes"), [(1, 16), (4, 4), (8, 2), (72, 1)])
def test_a_device_of_a_named_rate_fails_as_often_whatever_its_node_holds(devices: int, rack_nodes: int) -> None:
    for name, named in NAMED.items():
        model, (_, *said) = find_failures(name, devices)
        assert model.per_1000_node_days / devices == pytest.approx(named.per_1000_node_days / 8)
        assert [bool(said), model == named] == [devices != 8, devices == 8]
    model, notes = find_failures("llama3", devices)
    assert model.rack_nodes == rack_nodes
    assert devices == 8 or f"a node of {devices} fails {devices / 8:g} times as often as one of 8" in notes[1]


def test_what_a_user_says_is_of_his_own_nodes(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    for text in ("4.2", str(path)):
        assert find_failures(text, 1) == find_failures(text, 8)


def test_a_number_is_failures_of_nodes_and_says_what_is_assumed() -> None:
    model, notes = find_failures("4.2", 8)

    assert model.per_1000_node_days == 4.2
    assert "assumed" in notes[0]


def test_a_file_says_everything_itself(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    model, notes = find_failures(str(path), 8)

    assert notes == ()
    assert (model.name, model.source, model.rack_nodes) == ("ours", "our own log of 2026", 4)
    assert [(part.scope, part.repair_seconds) for part in model.components] == [(Scope.NODE, 43200), (Scope.RACK, 7200)]
    assert (model.straggler_slowdown, model.straggler_seconds) == (0.2, 10800)


def test_what_a_file_leaves_out_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text("""
[[component]]
name = "GPU"
per_1000_node_days = 2.5
[[component]]
name = "switch"
per_1000_node_days = 0.1
scope = "rack"
[[component]]
name = "bug"
per_1000_node_days = 0.1
scope = "process"
[stragglers]
per_1000_node_days = 1.0
""")
    _, (assumed,) = find_failures(str(path), 8)
    assert assumed == (
        "repair_hours = 24 (GPU, switch), rack_nodes = 2, stragglers.slowdown = 0.1, stragglers.hours = 1,"
        f" which is assumed, because {path} does not say"
    )


WIDER = """
row_nodes = 64
[[component]]
name = "spine"
per_1000_node_days = 0.01
scope = "row"
repair_hours = 4
[[component]]
name = "storage"
per_1000_days = 30
scope = "cluster"
repair_hours = 3
[[component]]
name = "link"
per_1000_node_days = 1
scope = "process"
burst_failures = 0.6
burst_hours = 2
"""


def test_a_file_says_what_takes_rows_and_all_and_what_comes_in_bursts(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(WIDER)
    model, notes = find_failures(str(path), 8)

    assert notes == ()
    spine, storage, link = model.components
    assert (spine.scope, model.row_nodes, model.per_1000_node_days) == (Scope.ROW, 64, 1.01)
    assert (storage.scope, storage.per_1000_days, storage.per_1000_node_days) == (Scope.CLUSTER, 30, 0)
    assert (link.burst_failures, link.burst_seconds, storage.burst_failures) == (0.6, 7200, 0)

    path.write_text(WIDER.replace("row_nodes = 64", "").replace("burst_hours = 2", ""))
    _, (assumed,) = find_failures(str(path), 8)
    assert assumed == f"row_nodes = 32, burst_hours = 1 (link), which is assumed, because {path} does not say"
    path.write_text(WIDER.replace("burst_failures = 0.6", ""))
    _, (idle,) = find_failures(str(path), 8)
    assert idle == "burst_hours of link has no effect, because burst_failures is 0"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("per_1000_days = 30", "per_1000_node_days = 30"), 'per_1000_node_days is not for scope = "cluster", whose'),
        (("per_1000_days = 30", ""), 'component.1: .*scope = "cluster" needs per_1000_days'),
        (("per_1000_node_days = 0.01", ""), 'component.0: .*scope = "row" needs per_1000_node_days'),
        (("per_1000_node_days = 0.01", "per_1000_days = 1"), 'per_1000_days is not for scope = "row"'),
        (("burst_failures = 0.6", "burst_failures = 1"), "component.2.burst_failures: .* 0.95"),
    ],
)
def test_a_rate_that_is_not_its_scopes_and_a_burst_without_end_are_refused(
    tmp_path: Path, change: tuple[str, str], says: str
) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(WIDER.replace(*change))

    with pytest.raises(ConfigError, match=says):
        read_failures(path)


def test_what_a_file_says_without_effect_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE.replace('name = "GPU"', 'name = "bug"\nscope = "process"'))
    _, (idle,) = find_failures(str(path), 8)
    assert idle == "repair_hours of bug has no effect, because what ends a process leaves its node"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rsc1", "did you mean rsc-1"),
        ("-1", "from 0 to 100000"),
        ("nan", "from 0 to 100000"),
        ("no.toml", "no such file"),
    ],
)
def test_what_is_no_rate_is_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_failures(text, 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ("repair_hours = 12", "repair_hour = 12"),
            "unknown key 'component.0.repair_hour'; did you mean 'repair_hours'",
        ),
        (("per_1000_node_days = 2.5", "per_1000_nodedays = 2.5"), "nodedays'; did you mean 'per_1000_node_days'"),
        (("rack_nodes = 4", "rack_node = 4"), "unknown key 'rack_node'; did you mean 'rack_nodes'"),
        (("per_1000_node_days = 2.5", "per_1000_node_days = -1"), "component.0.per_1000_node_days"),
        (('scope = "rack"', 'scope = "rak"'), "component.1.scope"),
        (("rack_nodes = 4", "rack_nodes ="), "not valid TOML"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE.replace(*change))

    with pytest.raises(ConfigError, match=says) as error:
        read_failures(path)
    assert str(path) in str(error.value)
