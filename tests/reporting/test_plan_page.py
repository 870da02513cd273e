"""A plan's page says what the plan says: verdict first, every number, every because; and it needs no network."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from allranks.layout import Layout
from allranks.plan import Plan, Ranked, Refusal, Traffic
from allranks.reporting.plan_page import group_refusals, rank_all, render_plan_page
from allranks.reporting.plotly_bundle import SCRIPT, read_asset
from tests.reporting import plans

ALL = [plans.pipelined, plans.single, plans.nothing_fits, plans.refused, plans.huge]


class Reader(HTMLParser):
    """What a reader sees: texts outside of scripts and styles, and whether every element is closed."""

    VOID = ("meta", "br", "wbr", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


def read(plan: Plan, command: str = "") -> Reader:
    reader = Reader()
    reader.feed(render_plan_page(plan, command).replace(read_asset(SCRIPT), ""))
    assert reader.open == []
    return reader


def test_the_verdict_comes_first_with_its_numbers() -> None:
    text = read(plans.pipelined()).text
    head = text[: text.index("Memory of a device")]
    for said in (
        "llama3-70b on 8x8:a100-80g@hdr200",
        "Best: dp_shard=2,tp=8,pp=4,schedule=interleaved,recompute=selective",
        "Because: the fastest of 212 that fit",
        "27.8 s25.0 s to 32.0 s",
        "75.4k",
        "41.2%",
        "60.8 GBof 79.0 GB; 57.8 GB to 64.4 GB",
        "648 nodes",
        "1834 configurations were looked at",
    ):
        assert said in head, said


def test_every_part_of_the_plan_is_there() -> None:
    text = read(plans.pipelined(), "allranks plan llama3-70b --html plan.html").text
    for said in (
        "Fits, at the upper bound too: 82% of the capacity",
        "computation 19.5 s",
        "16 of 128 micro-steps are drawn",
        "pp=4 16 groups of 4 ranks, over 4 nodes; over hdr200",
        "tp=8 8 groups of 8 ranks, each inside a node; over nvlink3",
        "20480",
        "14% slower: gradients and gathered parameters 6.4 s; 12.0 GB less memory",
        "no. 3best ddp",
        "12 in all",
        "and 7 more by this rule",
        "tp(16) is more than the 8 devices of a node",
        "-17.0 GB, -11% speed",
        "refused: offload=all comes with a later version",
        "1.0T",
        "404.2k USD",
        "1.75 USD an hour",
        "precision bfloat16, because",
        "allranks plan llama3-70b --html plan.html",
    ):
        assert said in text, said
    assert "kWh" not in text


def test_where_nothing_fits_the_page_says_what_came_nearest() -> None:
    text = read(plans.nothing_fits()).text
    assert "Nothing fits. Closest: dp_shard=8,recompute=full Because: does not fit: 431.6 GB of 79.0 GB" in text
    assert "Does not fit: 545% of the capacity" in text and "What came nearest" in text


def test_what_fits_with_offload_stands_in_the_verdict() -> None:
    way_out = Ranked(
        plans.make_estimate(), "fits with offload=parameters: ask for it: --layout auto,offload=parameters"
    )
    text = read(replace(plans.nothing_fits(), offloaded=way_out)).text
    head = text[: text.index("Memory of a device")]
    assert "With offload: dp_shard=2,tp=8" in head and "ask for it: --layout auto,offload=parameters" in head
    assert "With offload" not in read(plans.nothing_fits()).text


def test_a_cards_figures_have_their_names_where_there_is_no_heading() -> None:
    """On a narrow screen the heads of the tables are gone: what is no name, layout or reason says what it is."""
    reader = read(plans.pipelined())
    numbers = [attrs for tag, attrs in reader.tags if tag == "td" and attrs.get("class") == "n"]
    cards = [attrs for tag, attrs in reader.tags if tag == "table" and attrs.get("class") == "cards"]
    assert len(cards) == 4
    assert sum("data-label" in attrs for attrs in numbers) > 20
    labels = {attrs["data-label"] for tag, attrs in reader.tags if "data-label" in attrs}
    assert labels == {"bytes", "collectives", "time", "of it hidden", "micro-batch", "step", "peak", "fits", "mfu"}
    whys = sum(attrs.get("class") == "why" for _, attrs in reader.tags)
    plan = plans.pipelined()
    shown = sum(len(group.shown) for group in group_refusals(plan.refusals))
    assert whys == len(rank_all(plan)) + shown + len(plan.what_ifs)


def test_less_than_one_sample_a_second_is_no_zero() -> None:
    slow = replace(plans.make_estimate(), samples_per_second=0.29)
    text = read(replace(plans.pipelined(), best=Ranked(slow, "fast"))).text
    assert "0.29 samples a second" in text


def test_where_all_is_refused_the_reasons_are_left() -> None:
    reader = read(plans.refused())
    assert "No layout is possible" in reader.text and "3 ranks do not share 2 samples" in reader.text
    assert not any("plotly-graph-div" in (attrs.get("class") or "") for _, attrs in reader.tags)


def test_what_may_fit_is_called_unsure() -> None:
    plan = plans.pipelined()
    text = read(replace(plan, best=None, closest=Ranked(plans.make_estimate(capacity=61e9), "not sure to fit"))).text
    assert "Not sure to fit" in text and "not sure41.2%" in text


def test_the_legend_names_what_only_others_have() -> None:
    plan = plans.pipelined()
    other = plans.make_estimate(time=replace(plans.TIME, context=2.0))
    assert "cp messages 0 us" in read(replace(plan, others=(Ranked(other, "slower"),))).text
    last = replace(plans.make_estimate(), stages={3: replace(plans.MEMORY, communication=1e9)})
    text = read(replace(plan, best=Ranked(last, "fast"))).text
    assert "message buffers 0 B" in text and "cp messages" not in text


def test_the_legend_of_memory_has_what_the_allocator_holds_beyond() -> None:
    one = plans.make_estimate()
    peak = replace(one.peak_bytes, expected=one.memory.total + 6.1e9)
    text = read(replace(plans.pipelined(), best=Ranked(replace(one, peak_bytes=peak), "fast"))).text
    assert "allocator's spare 6.1 GB" in text
    assert "allocator's spare" not in read(plans.pipelined()).text


def test_a_change_that_may_fit_has_one_word_for_it() -> None:
    host = {"host_bytes": 2e12, "host_capacity_bytes": 1e12}
    unsure = plans.make_estimate(capacity=61e9)
    for estimate, word in ((unsure, "not sure"), (replace(unsure, **host), "no")):  # type: ignore[arg-type]
        change = replace(plans.pipelined().what_ifs[0], estimate=estimate, because="[because]")
        text = read(replace(plans.pipelined(), what_ifs=(change,))).text
        assert re.search(rf"\d GB{word}\[because\]", text)


def test_limits_that_are_not_kept_stand_in_the_verdict() -> None:
    text = read(replace(plans.pipelined(), unmet=("takes 150 d, more than the 30 d of --deadline",))).text
    assert "Not met: takes 150 d, more than" in text[: text.index("Memory of a device")]


def test_what_the_host_keeps_is_said() -> None:
    best = replace(plans.make_estimate(), host_bytes=3e11, host_capacity_bytes=2e12)
    text = read(replace(plans.pipelined(), best=Ranked(best, "fast"))).text
    assert "keep 300.0 GB in its host memory, of 2.0 TB" in text
    full = replace(best, host_capacity_bytes=2e11)
    text = read(replace(plans.pipelined(), best=None, closest=Ranked(full, "no room"))).text
    assert "Does not fit: the host memory of a node is too small." in text


def test_how_positions_are_exchanged_is_said_beside_the_layout() -> None:
    best = plans.make_estimate(Layout(cp=4, dp_shard=16, context="ring"))
    assert "Best: dp_shard=16,cp=4 context=ring" in read(replace(plans.pipelined(), best=Ranked(best, "fast"))).text
    assert "context=" not in read(plans.pipelined()).text


def test_data_axes_have_the_link_of_dp() -> None:
    text = read(plans.pipelined()).text
    assert "dp_shard=2 32 groups of 2 ranks, over 2 nodes; over hdr200." in text


def test_under_hsdp_each_data_axis_has_its_own_link() -> None:
    rows = (Traffic("dp_shard", "nvlink3", 8e9, 4, 1.0, 1.0), Traffic("dp_replicate", "hdr200", 1e9, 4, 2.0, 2.0))
    best = replace(plans.make_estimate(Layout(dp_replicate=8, dp_shard=8)), traffic=rows)
    text = read(replace(plans.pipelined(), best=Ranked(best, "fast"))).text
    assert re.search(r"dp_shard=8 [^.]*over nvlink3\.", text) and re.search(r"dp_replicate=8 [^.]*over hdr200\.", text)


def test_one_device_has_samples_and_no_axes() -> None:
    text = read(plans.single()).text
    assert "samples a second23.7k" in text and "tokens" not in text
    assert "One process computes the whole model" in text and "The pipeline" not in text


def test_a_schedule_that_goes_there_and_back_is_drawn() -> None:
    best = plans.make_estimate(Layout(pp=4, dp_replicate=16, schedule="zbv"))
    text = read(replace(plans.pipelined(), best=Ranked(best, "fast"))).text
    assert "goes there and back" in text and "A rank then waits 907.8 ms" in text
    assert "whose stages differ, has 1.6 s of 27.8 s" in text


@pytest.mark.parametrize("make", ALL)
def test_the_page_asks_nobody_for_anything(make: object) -> None:
    page = render_plan_page(make())  # type: ignore[operator]
    ours = page.replace(read_asset(SCRIPT), "")
    assert len(page) - len(ours) == len(read_asset(SCRIPT))
    assert not re.search(r"(src|href|action|url)\s*[=(]\s*[\"']?\s*(https?:)?//", ours)
    assert "http://" not in ours and "https://" not in ours
    assert len(ours) < 500_000


@pytest.mark.parametrize("make", ALL)
def test_headings_tables_and_pictures_have_their_texts(make: object) -> None:
    reader = read(make())  # type: ignore[operator]
    tags = reader.tags
    assert [tag for tag, _ in tags].count("h1") == 1 and ("html", {"lang": "en"}) in tags
    assert [tag for tag, _ in tags].count("table") == [tag for tag, _ in tags].count("caption")
    ids = [attrs["id"] for _, attrs in tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    assert all(attrs["aria-labelledby"] in ids for tag, attrs in tags if tag == "section")
    assert all(attrs.get("aria-label") for _, attrs in tags if attrs.get("role") in ("img", "region"))
    assert all(attrs.get("scope") for tag, attrs in tags if tag == "th")
    assert all(attrs["href"] in {f"#{name}" for name in ids} for tag, attrs in tags if tag == "a")


EVIL = "<script>alert('x')</script>"


def test_every_string_is_escaped() -> None:
    plan = plans.pipelined()
    assert plan.best is not None and plan.bill is not None
    evil = replace(
        plan,
        model=EVIL,
        cluster=EVIL,
        best=replace(
            plan.best, because=EVIL, estimate=plans.make_estimate(traffic=(replace(plans.TRAFFIC[0], link=EVIL),))
        ),
        others=(replace(plan.others[0], because=EVIL, family=EVIL),),
        refusals=(Refusal(EVIL, EVIL, EVIL),),
        notes=(EVIL,),
        what_ifs=(replace(plan.what_ifs[1], change=EVIL, because=EVIL),),
        bill=replace(plan.bill, currency=EVIL, because=EVIL),
        unmet=(EVIL,),
    )
    page = render_plan_page(evil, EVIL)
    assert "<script>alert" not in page
    assert read(evil, EVIL).text.count(EVIL) >= 15


def test_ranked_are_named_by_their_place() -> None:
    assert [name for name, _ in rank_all(plans.pipelined())] == ["best", "no. 2", "no. 3"]
    assert [name for name, _ in rank_all(plans.nothing_fits())] == ["closest"]
    assert rank_all(plans.refused()) == ()


def test_refusals_are_grouped_by_rule() -> None:
    first, second = group_refusals([*(Refusal("a", str(n), "") for n in range(6)), Refusal("b", "x", "")])
    assert (first.rule, [one.layout for one in first.shown], first.left_out) == ("a", ["0", "1", "2", "3"], 2)
    assert (second.rule, len(second.shown), second.left_out) == ("b", 1, 0)
