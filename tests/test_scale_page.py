"""docs/explanation/scale.md: its program runs, and what it says of growth is what is measured."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import environment
from tools.scale import RESULTS, Growth, extrapolate, table

pytestmark = pytest.mark.timeout(1000)  # the first test waits for the program
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What the program prints now, at small sizes."""
    command = [sys.executable, str(ROOT / "bench" / "scale.py"), "--quick", "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


def sizes(rows: list[dict[str, Any]], part: str) -> list[int]:
    return [row["size_bytes"] for row in rows if row["part"].startswith(part)]


@pytest.mark.full
def test_the_program_measures_the_parts_of_the_page(rows: list[dict[str, Any]]) -> None:
    stored = json.loads(RESULTS.read_text())["rows"]

    def kinds(found: list[dict[str, Any]]) -> set[str]:
        return {row["part"].partition(":")[0].split(" ")[0] for row in found}

    assert kinds(rows) == kinds(stored)
    assert len(list(table(stored))) == len(stored) + 2


def test_the_vector_of_a_step_is_the_same_for_any_number_of_ranks(rows: list[dict[str, Any]]) -> None:
    """As it goes into the all-reduce of worlds of several sizes; each stage of a pipeline has two numbers in it."""
    vectors = [row for row in rows if row["part"].startswith("agreement") and "stages" not in row["part"]]
    assert len({row["number"] for row in vectors}) > 1
    assert {row["size_bytes"] for row in vectors} == {128}
    assert sizes(rows, "agreement on a step: one rank's vector, of 16 stages") == [128 + 16 * 16]
    figures = extrapolate(rows)
    assert (figures["vector_bytes"], figures["stage_bytes"]) == ("128", "16")


def test_what_was_not_made_is_marked(rows: list[dict[str, Any]]) -> None:
    reckoned = {row["part"] for row in rows if row["reckoned"]}
    assert reckoned == {row["part"] for row in rows if " in files of 8 chunks" in row["part"]}
    marked = {line.split(" (*reckoned*)")[0].removeprefix("| ") for line in table(rows) if "(*reckoned*)" in line}
    assert marked == reckoned


def test_every_ranks_settings_are_counted(rows: list[dict[str, Any]]) -> None:
    few, many = (row for row in rows if row["part"].startswith("start"))
    assert many["size_bytes"] * few["number"] == few["size_bytes"] * many["number"] > 0
    assert many["microseconds"] > few["microseconds"] > 0


def test_what_the_first_rank_gathers_grows_with_the_ranks(rows: list[dict[str, Any]]) -> None:
    gathered = [row for row in rows if "gathered and merged" in row["part"]]

    grown = gathered[-1]["size_bytes"] / gathered[0]["size_bytes"]
    assert grown == pytest.approx(gathered[-1]["number"] / gathered[0]["number"], rel=0.1)


def test_what_a_resume_hears_grows_with_the_ranks(rows: list[dict[str, Any]]) -> None:
    heard = [row for row in rows if row["part"].startswith("resuming")]
    assert [row["size_bytes"] for row in heard] == [row["number"] * 20 * (24 + 2 * 16) for row in heard]
    assert extrapolate(rows)["resume_ranks"] == str(heard[-1]["number"])


def test_the_state_of_a_rendezvous_grows_with_the_hosts(rows: list[dict[str, Any]]) -> None:
    met = [row for row in rows if row["part"].startswith("rendezvous")]
    assert met[-1]["size_bytes"] / met[0]["size_bytes"] == pytest.approx(met[-1]["number"] / met[0]["number"], rel=0.3)
    assert extrapolate([*rows, *met])["meeting_hosts"] == str(met[-1]["number"])


def test_what_ranks_tell_of_their_digests_grows_with_the_ranks_alone(rows: list[dict[str, Any]]) -> None:
    few, many = (row for row in rows if row["part"].startswith("digests"))
    assert many["size_bytes"] / few["size_bytes"] == pytest.approx(many["number"] / few["number"], rel=0.01)
    assert extrapolate(rows)["digest_ranks"] == f"{many['number']:,}"


def test_the_line_of_a_step_does_not_grow_with_the_samples(rows: list[dict[str, Any]]) -> None:
    few, many = sizes(rows, "journal")
    assert few <= many <= few + 20


def test_the_position_is_one_number(rows: list[dict[str, Any]]) -> None:
    assert max(sizes(rows, "order")) <= 20


@pytest.mark.parametrize("name", ["gathered by the first rank", "the manifest"])
def test_what_a_save_tells_grows_with_its_tensors_and_chunks(rows: list[dict[str, Any]], name: str) -> None:
    """600 tensors more add four times what 150 more do; in files of eight chunks each rank tells of seven more."""
    found = {
        tuple(int(number) for number in re.findall(r"\d+", row["part"])): row["size_bytes"]
        for row in rows
        if row["part"].endswith(f": {name}")
    }
    assert set(found) == {(50, 1), (200, 1), (800, 1), (200, 8)}
    assert (found[800, 1] - found[200, 1]) / (found[200, 1] - found[50, 1]) == pytest.approx(4, rel=0.05)
    (ranks,) = {row["number"] for row in rows if row["part"].endswith(f": {name}")}
    assert (found[200, 8] - found[200, 1]) / (7 * ranks) == pytest.approx(90, rel=0.05)  # a line with a SHA-256
    grown = found[800, 1] / found[50, 1]
    assert grown == pytest.approx(16, rel=0.1) if name.startswith("gathered") else grown < 16


def test_what_a_save_tells_is_reckoned_from_its_bytes() -> None:
    """The bytes of every measured save follow from what one rank, one tensor and one chunk add."""
    stored = json.loads(RESULTS.read_text())["rows"]
    gathered, manifest = (Growth.of(stored, name) for name in ("gathered by the first rank", "the manifest"))
    for row in (row for row in stored if row["part"].startswith("saving 200 tensors: ")):
        ranks = row["number"]
        one = gathered if "gathered" in row["part"] else manifest
        tensor = one.tensor * (ranks if one is gathered else 1)
        assert row["size_bytes"] == pytest.approx(ranks * one.rank + 200 * tensor, rel=0.05)


def test_an_extrapolation_is_in_proportion() -> None:
    merged = {"part": "saving 100 tensors: gathered and merged", "number": 4096, "microseconds": 1e6, "size_bytes": 100}
    rows = [merged, *(row for row in json.loads(RESULTS.read_text())["rows"] if " in files of " in row["part"])]

    assert extrapolate(rows)["gather_seconds"] == "2 min 17 s"
    assert extrapolate(rows)["gather_bytes"] == "13.7 kB"
