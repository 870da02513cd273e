"""The plain strategies, each at its best, and why it loses or fails."""

from allranks.plan import Ranked, Refusal
from allranks.planning.choices import Space, every_choice
from allranks.planning.families import plain_families
from allranks.planning.hardware import find_cluster
from allranks.planning.search import Search, rank
from tests.planning.profiles import cluster, decoder
from tests.planning.questions import ask


def weighed(space: Space) -> tuple[Search, dict[str, Ranked], list[Refusal]]:
    search = Search(space)
    search.run()
    ranked, refusals = plain_families(search)
    assert len({one.family for one in ranked}) == len(ranked)
    return search, {one.family: one for one in ranked}, refusals


def test_each_family_is_the_best_of_its_kind() -> None:
    space = ask().space()
    _, families, _ = weighed(space)
    assert set(families) == {"ddp", "zero-1", "fsdp", "hsdp", "tp", "pp", "cp"}
    every = Search(space).weigh(every_choice(space)).estimates.values()
    fsdp = [one for one in every if one.choice.layout.dp_shard == 16 and one.choice.layout.sharding != "optimizer"]
    assert rank(families["fsdp"].estimate) == min(rank(one) for one in fsdp if one.fits)


def test_why_each_loses() -> None:
    search, families, refusals = weighed(ask().space())
    assert families["ddp"].because.startswith("does not fit: ")
    assert "the optimizer's state 64.2 GB" in families["ddp"].because
    best = search.found.best
    assert best is not None
    for family in families.values():
        slower = family.estimate.step_seconds.expected / best.step_seconds.expected - 1
        if family.estimate.fits and slower >= 0.01:
            assert family.because.startswith(f"{slower:.0%} slower: ")
    assert families["tp"].estimate.choice.layout.tp == 8
    assert Refusal("tensor", "tp=16", "tp=16 does not divide 8 key-value heads; tp can be 1, 2, 4, 8") in refusals


def test_a_family_that_no_rule_lets_in_is_refused() -> None:
    _, families, refusals = weighed(
        Space({"bfloat16": decoder(tensor_parallel=False, context_parallel=False)}, cluster(1, 4), 8)
    )
    assert "tp" not in families and "cp" not in families
    assert {"tensor", "context"} <= {refusal.rule for refusal in refusals}


def test_one_device_and_a_written_layout_have_no_families() -> None:
    alone = Space({"bfloat16": decoder()}, find_cluster("1:a100-80g"), 8)
    assert plain_families(Search(alone)) == ([], [])
