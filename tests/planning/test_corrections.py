"""What runs took beside what was calculated: kept by machine and figures, and taken by the next plan there alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from allranks import __version__
from allranks.layout import Layout
from allranks.plan import Choice
from allranks.planning.corrections import (
    LAST_RUNS,
    MOST,
    Row,
    corrected,
    corrections_of,
    factor_of,
    family_of,
    machine_of,
    read_rows,
    remember,
)
from allranks.planning.estimate import estimate
from allranks.planning.question import Question
from allranks.planning.search import Search
from allranks.planning.this_machine import cpu_cluster
from tests.planning.profiles import decoder

HERE = cpu_cluster(1, 2, None, name="local", calibrated=False)
SLUG = "a-processor-2cores"


def row(run: str, family: str, ratio: float, context: float | None = None, machine: str = "") -> Row:
    return Row(
        run=run, machine=machine or machine_of(SLUG, HERE), version=__version__, family=family, seconds_ratio=ratio,
        context_bytes=context,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        (Layout(), "single"), (Layout(dp_replicate=2), "ddp"), (Layout(dp_shard=4), "fsdp"),
        (Layout(dp_shard=4, sharding="optimizer"), "zero-1"), (Layout(dp_replicate=2, dp_shard=2), "fsdp+ddp"),
        (Layout(dp_shard=2, sharding="grad_op"), "fsdp-grad_op"), (Layout(tp=2, pp=2), "pp+tp"),
        (Layout(dp_replicate=4, ep=2), "ep+ddp"),
    ],
)  # fmt: skip
def test_a_family_is_its_axes_and_how_it_shares(layout: Layout, family: str) -> None:
    assert family_of(layout) == family


def test_the_median_of_the_last_runs_counts_within_limits() -> None:
    assert corrections_of([]) == {}
    ratios = [9.0, *[1.1, 1.3, 1.2, 100.0], *[1.2] * (LAST_RUNS - 4)]
    found = corrections_of([row(str(n), "ddp", ratio) for n, ratio in enumerate(ratios)])
    assert (found["ddp"].factor, found["ddp"].num_runs) == (1.2, LAST_RUNS)
    wild = corrections_of([row("a", "ddp", 1000.0), row("b", "fsdp", 1e-3)])
    assert (wild["ddp"].factor, wild["fsdp"].factor) == (MOST, 1 / MOST)


def test_a_family_that_nobody_ran_takes_the_middle_of_the_others(tmp_path: Path) -> None:
    """Else a plan would prefer whatever was never tried."""
    path = tmp_path / "runs.json"
    remember(path, row("a", "ddp", 2.0))
    remember(path, row("b", "fsdp", 2.0))
    remember(path, row("c", "pp", 1.5))
    found = corrected(HERE, SLUG, path)
    assert factor_of(found, Layout(pp=2)) == 1.5 and factor_of(found, Layout(tp=2)) == pytest.approx(2.0)
    assert factor_of(HERE, Layout(tp=2)) == 1.0


def test_seconds_of_every_cause_are_multiplied_and_the_rest_follows(tmp_path: Path) -> None:
    path, choice = tmp_path / "runs.json", Choice(Layout(dp_replicate=2), 8, 4, "float32")
    remember(path, row("a", "ddp", 1.5))
    plain, found = estimate(decoder(), HERE, choice), estimate(decoder(), corrected(HERE, SLUG, path), choice)
    assert found.correction == 1.5 and plain.correction == 1.0
    assert found.step_seconds.expected == pytest.approx(1.5 * plain.step_seconds.expected)
    assert found.time.total == pytest.approx(found.step_seconds.expected)
    assert found.mfu == pytest.approx(plain.mfu / 1.5)
    assert found.samples_per_second == pytest.approx(plain.samples_per_second / 1.5)


def test_a_note_says_what_was_changed_and_why(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    for run in ("a", "b", "b"):
        remember(path, row(run, "ddp", 1.18))
    (*_, note) = corrected(HERE, SLUG, path).notes
    assert "ddp x1.18" in note and "because on this machine were measured ddp 1.18x the prediction in 2 runs" in note
    assert str(path) in note


def test_other_figures_other_machines_and_other_versions_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    remember(path, row("a", "ddp", 1.5))
    remember(path, row("b", "ddp", 1.5).model_copy(update={"version": "0.0.1"}))
    assert corrected(HERE, SLUG, path).corrections
    assert not corrected(HERE, "another-4cores", path).corrections
    measured_anew = replace(HERE, device=replace(HERE.device, memory_bandwidth=1.0))
    assert not corrected(measured_anew, SLUG, path).corrections
    alone = tmp_path / "alone.json"
    remember(alone, row("b", "ddp", 1.5).model_copy(update={"version": "0.0.1"}))
    assert not corrected(HERE, SLUG, alone).corrections


@pytest.mark.parametrize("text", ["", "{", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{"run": 1}]}', "[]"])
def test_a_torn_file_is_said_once_ignored_and_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    found = corrected(HERE, SLUG, path)
    assert not found.corrections and found.machine
    (*_, note) = found.notes
    assert note.count("\n") == 0 and str(path) in note and "is left out, because" in note
    assert "begun anew, because" in remember(path, row("a", "ddp", 1.5))
    assert len(read_rows(path)[0]) == 1 and remember(path, row("b", "ddp", 1.5)) == ""


def test_what_a_process_takes_is_that_of_the_last_runs_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    known = HERE.device.context_bytes
    assert known is not None
    for run, context in (("a", 5e8), ("b", 6e8), ("c", 7e8)):
        remember(path, row(run, "ddp", 1.0, context))
    assert corrected(HERE, SLUG, path).device.context_bytes == 6e8
    for run in ("d", "e", "f", "g"):
        remember(path, row(run, "ddp", 1.0, 1e12))
    found = corrected(HERE, SLUG, path)
    assert found.device.context_bytes == MOST * known
    choice = Choice(Layout(dp_replicate=2), 8, 4, "float32")
    assert estimate(decoder(), found, choice).memory.framework == MOST * known


def test_the_search_finds_a_family_that_is_corrected_down(tmp_path: Path) -> None:
    """Bounds come from plain members, whose family may be corrected up."""
    path = tmp_path / "runs.json"
    remember(path, row("a", "ddp", 3.9))
    remember(path, row("b", "fsdp-grad_op", 0.3))
    remember(path, row("c", "tp", 1.0))
    cluster = corrected(HERE, SLUG, path)
    profile = decoder()
    space = Question(lambda seq, precision: profile, cluster, 8, precisions=("float32",)).space()
    found = Search(space).run().best
    assert found is not None and family_of(found.choice.layout) == "fsdp-grad_op"
