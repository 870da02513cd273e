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
    assert {part.scope for part in model.components} == set(Scope)


def test_a_number_is_failures_of_nodes_and_says_what_is_assumed() -> None:
    model, notes = find_failures("4.2")

    assert model.per_1000_node_days == 4.2
    assert "assumed" in notes[0]


def test_a_file_says_everything_itself(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE)
    model, notes = find_failures(str(path))

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
    _, (assumed,) = find_failures(str(path))
    assert assumed == (
        "repair_hours = 24 (GPU, switch), rack_nodes = 2, stragglers.slowdown = 0.1, stragglers.hours = 1,"
        f" which is assumed, because {path} does not say"
    )


def test_what_a_file_says_without_effect_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(FILE.replace('name = "GPU"', 'name = "bug"\nscope = "process"'))
    _, (idle,) = find_failures(str(path))
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
        find_failures(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("repair_hours = 12", "repair_hour = 12"), "component.0.repair_hour: Extra inputs"),
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
