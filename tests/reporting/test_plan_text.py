"""A Plan for a terminal: verdict first, within 100 columns, nothing cut off."""

from dataclasses import replace

from allranks.layout import Layout
from allranks.plan import Checked, Plan, Ranked, Refusal, Span
from allranks.planning.answer import make_plan
from allranks.reporting.plan_text import SHOWN_REFUSALS, render_comparison, render_plan
from allranks.units import format_bytes
from tests.planning.questions import ask
from tests.reporting.plans import MEMORY, make_estimate, pipelined


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_everything_is_said_within_the_columns() -> None:
    plan = make_plan(ask(tokens=1e12, limit_seconds=3600.0))
    plan = replace(plan, refusals=plan.refusals + tuple(Refusal("r", f"x={n}", "because") for n in range(9)))
    for width in (80, 100):
        text = render_plan(plan, width=width)
        assert max(map(len, text.splitlines())) <= width
        said = squeezed(text)
        for change in plan.what_ifs:
            assert squeezed(change.because)[:30] in said
        assert plan.best is not None and squeezed(plan.best.because) in said
        assert "more than the deadline of" in said
        more = f"and {len(plan.refusals) - SHOWN_REFUSALS} more"
        assert (more in said) == (len(plan.refusals) > SHOWN_REFUSALS)
        assert all(squeezed(note)[:40] in said for note in plan.notes)


def test_shares_of_time_and_memory_add_up() -> None:
    lines = render_plan(make_plan(ask())).splitlines()
    for title in ("Where the step goes", "What fills the memory"):
        start = lines.index(title) + 1
        rows = lines[start : lines.index("", start)]
        shares = [int(word[:-1]) for row in rows for word in row.split() if word.endswith("%")]
        assert len(shares) == len(rows) and abs(sum(shares) - 100) <= len(rows)


def test_the_bill_has_its_interval_and_a_pipeline_its_stages() -> None:
    said = squeezed(render_plan(pipelined()))
    assert "404,250 USD (342,100 to 466,400)" in said
    best = pipelined().best
    assert best is not None
    for stage, use in best.estimate.stages.items():
        assert f"{format_bytes(use.total)} on stage {stage}" in said
    flat = replace(best.estimate, choice=replace(best.estimate.choice, layout=Layout(dp_shard=8)))
    assert "on stage" not in squeezed(render_plan(replace(pipelined(), best=replace(best, estimate=flat))))


def checked_section(plan: Plan) -> list[str]:
    lines = render_plan(plan).splitlines()
    start = lines.index("Checked by dry runs") + 1
    return lines[start : lines.index("", start)]


def test_what_dry_runs_said_and_what_follows() -> None:
    best, small = make_estimate(), make_estimate(Layout(dp_shard=8))
    large = make_estimate(Layout(dp_replicate=8), replace(MEMORY, weights=90e9))
    checked = (
        *(Checked(large, large, "100.0 GB counted"), Checked(small, None, "not rehearsed"), Checked(best, best, "so")),
    )
    plan = replace(pipelined(), checked=checked, others=(Ranked(large, "100.0 GB counted"),))
    rows = checked_section(plan)
    assert [row.split("  ")[1] for row in rows if row[2] != " "] == ["dropped", "not checked", "stands", "so"]
    said = squeezed(" ".join(rows))
    assert "dropped dp_replicate=8, micro_batch 1 100.0 GB counted" in said
    assert said.endswith(f"so {best.choice.layout}, micro_batch 1 leads in its place")
    assert "Why not the others" not in render_plan(plan)
    assert checked_section(replace(plan, checked=checked[::-1]))[-1].endswith("the plan's best stays")
    unseen = replace(plan, checked=(Checked(best, None, "not rehearsed"),))
    assert checked_section(unseen)[-1].endswith("the plan's best stays, and no dry run has seen it")
    nothing = checked_section(replace(plan, best=None, closest=None))
    assert nothing[-1].endswith("nothing is left")
    assert "Checked by dry runs" not in render_plan(pipelined())


def test_what_dry_runs_say_where_nothing_fits_as_planned() -> None:
    fitting = make_estimate()
    large = replace(fitting, peak_bytes=Span(90e9, 91e9, 92e9), capacity_bytes=80e9)
    other = replace(large, choice=replace(large.choice, layout=Layout(tp=8)))
    closest = replace(pipelined(), best=None, closest=Ranked(large, "does not fit"))
    for plan, checked, said in (
        (
            replace(closest, best=Ranked(fitting, "fits"), closest=None),
            Checked(large, fitting, "counted"),
            "what came closest fits",
        ),
        (closest, Checked(large, large, "counted"), "the closest does not fit"),
        (closest, Checked(large, None, "counted"), "the closest does not fit, and no dry run has seen it"),
        (closest, Checked(other, other, "counted"), "is closer, and does not fit, and no dry run has seen it"),
        (
            closest,
            Checked(replace(other, peak_bytes=fitting.peak_bytes), large, "counted"),
            "nothing fits any more, and ",
        ),
    ):
        rows = squeezed(" ".join(checked_section(replace(plan, checked=(checked,)))))
        assert said in rows, rows
        assert "the plan's best stays" not in rows


def test_nothing_left_is_a_refusal() -> None:
    text = render_plan(Plan("net", "here", 0, None, (), (Refusal("batch", "dp=4", "too few samples"),)))
    assert "REFUSED: no layout is left" in text and "batch: dp=4" in text and "too few samples" in text


def test_clusters_side_by_side_the_fastest_first() -> None:
    slow, fast = make_plan(ask(where="8:a100-80g")), make_plan(ask(where="8:h100"))
    rows = render_comparison([slow, fast]).splitlines()
    assert rows[2].startswith("8:h100") and max(map(len, rows)) <= 100
    assert any(row.startswith("8:a100-80g") for row in rows[3:])
    refused = render_comparison([replace(slow, best=None, closest=None), fast])
    assert "every layout is refused" in squeezed(refused)


WIDE = Layout(dp_replicate=2, dp_shard=4, cp=2, tp=8, pp=4)
LONG = replace(WIDE, schedule="interleaved", recompute="full", offload="activations", compile="block")


def test_long_layouts_end_their_lines_behind_commas_so_that_they_can_be_copied() -> None:
    found, plan = make_estimate(LONG), pipelined()
    assert plan.best is not None
    plan = replace(
        plan,
        best=replace(plan.best, estimate=found),
        others=(Ranked(found, "it [for one] is slower"), Ranked(found, "it is slower", "fsdp")),
        refusals=(Refusal("pipeline.stages", str(LONG), "too few blocks"),),
        checked=(Checked(found, found, "stands"),),
    )
    drawn = [render_plan(plan), render_comparison([plan, plan])]
    words = [part for part in str(LONG).split(",") if "=" in part]
    for text, times in zip(drawn, (5, 2), strict=True):
        assert max(map(len, text.splitlines())) <= 100
        for word in words:
            assert text.count(word) >= times, word
    assert "it [for one] is slower" in squeezed(drawn[0]), "what stands in brackets is no markup"
    lines = drawn[0].splitlines()
    (start,) = [place for place, line in enumerate(lines) if line.startswith("FITS: ")]
    assert "".join(lines[start : start + 2])[len("FITS: ") :].startswith(f"{LONG} context=")
