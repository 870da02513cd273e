"""A Question into a Plan, and the least or the most that does."""

from dataclasses import replace

import pytest

from allranks.layout import parse_layout
from allranks.model_profile import ModelProfile
from allranks.planning import answer
from allranks.planning.answer import make_plan, plan_gpus, plan_seq
from allranks.planning.question import Question
from allranks.planning.scale import cluster_of
from allranks.planning.search import Search
from tests.planning.profiles import decoder
from tests.planning.questions import ask


def test_a_plan_has_the_best_the_others_and_the_refused() -> None:
    plan = make_plan(ask(what_ifs=("tp=4",), notes=("a note",)))
    best = Search(ask().space()).run().best
    assert plan.best is not None and best is not None
    assert plan.best.estimate.choice == best.choice
    assert plan.best.because.startswith("the fastest of ")
    assert (plan.model, plan.cluster, plan.num_devices, plan.seq) == ("llama3-8b", "2x8:a100-80g", 16, 4096)
    assert 8.0e9 < plan.parameters < 8.1e9
    runners = [other for other in plan.others if not other.family]
    assert runners and all(other.estimate.fits for other in runners)
    assert best.choice not in {other.estimate.choice for other in runners}
    assert {"ddp", "fsdp", "tp", "pp"} <= {other.family for other in plan.others}
    assert "tp=16" in {refusal.layout for refusal in plan.refusals}
    assert "tp=4" in {change.change for change in plan.what_ifs}
    assert plan.notes[0] == "a note" and any("fabric" in note for note in plan.notes)
    assert plan.bill is None and plan.unmet == ()


def test_what_does_not_fit_names_the_closest() -> None:
    plan = make_plan(ask("llama3-70b", "1x4:a100-40g"))
    assert plan.best is None and plan.closest is not None and plan.leading is plan.closest
    assert plan.closest.because.startswith("does not fit: ")
    assert plan.what_ifs


def test_where_every_layout_is_refused_there_is_no_closest() -> None:
    profile = decoder(layers=3, tensor_parallel=False, context_parallel=False)
    question = replace(ask(batch=1, where="1x7:a100-80g"), make_profile=lambda seq, precision: profile)
    plan = make_plan(question)
    assert plan.leading is None and plan.what_ifs == ()
    assert {refusal.rule for refusal in plan.refusals} == {"batch", "tensor", "context", "pipeline_blocks"}


def test_a_bill_for_tokens_and_what_is_not_within_the_limits() -> None:
    plan = make_plan(ask(tokens=1e12, limit_seconds=3600.0))
    assert plan.bill is not None and plan.bill.tokens == 1e12
    assert len(plan.unmet) == 1 and "more than the deadline of 1 h 00 min" in plan.unmet[0]


def test_the_fewest_devices_that_fit() -> None:
    plan = plan_gpus(ask("llama3-8b", "4x8:a100-80g"))
    assert plan.best is not None
    assert plan.num_devices == 2
    alone = make_plan(ask(where="1x1:a100-80g"))
    assert alone.best is None and alone.closest is not None
    assert f"2 devices are the fewest, because 1 do not do: {alone.closest.because}" in plan.notes


def test_the_fewest_devices_that_keep_a_deadline() -> None:
    question = ask("llama3-8b", "4x8:a100-80g", batch=512, tokens=1e10, limit_seconds=86400.0)
    plan = plan_gpus(question)
    assert plan.best is not None and plan.bill is not None and plan.unmet == ()
    assert plan.bill.seconds.expected <= 86400.0
    assert plan.num_devices > plan_gpus(ask("llama3-8b", "4x8:a100-80g", batch=512)).num_devices
    fewer = make_plan(replace(question, cluster=cluster_of(question.cluster, plan.num_devices - 8)))
    because = f"because {fewer.num_devices} do not do: {fewer.unmet[0]}"
    assert f"{plan.num_devices} devices are the fewest of the numbers tried, {because}" in plan.notes


@pytest.mark.full
def test_between_two_sizes_the_fewest_nodes_are_looked_for() -> None:
    """96 fail and 128 do: 104, which do too, are not passed over."""
    question = ask("llama3-8b", "4x8:a100-80g", batch=512, tokens=1e10, limit_seconds=7.2 * 3600)
    plan = plan_gpus(question)
    assert plan.num_devices == 104 and plan.unmet == ()
    assert make_plan(replace(question, cluster=cluster_of(question.cluster, 96))).unmet


def test_where_no_number_does_the_closest_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.planning.scale.MOST_NODES", 4)
    question = ask("llama3-8b", "1x4:a100-80g", batch=64, tokens=1e12, limit_seconds=60.0)
    plan = plan_gpus(question)
    assert plan.num_devices == 16 and len(plan.unmet) == 1
    assert f"no number of devices does; 16 come closest: {plan.unmet[0]}" in plan.notes


def test_out_of_reach_is_not_searched_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a minute nor ten dollars do: a few numbers are looked at, from the end that is nearer."""
    looked: list[int] = []
    why = answer._why_not_enough

    def look(asked: Question) -> tuple[float | None, str] | None:
        looked.append(asked.cluster.num_devices)
        return why(asked)

    monkeypatch.setattr(answer, "_why_not_enough", look)
    monkeypatch.setattr("allranks.planning.scale.MOST_NODES", 64)
    question = ask("gpt2", "1x8:a100-80g", batch=64, tokens=1e12)
    question = replace(question, seq=None, cluster=replace(question.cluster, device_hour_price=2.0))
    late = plan_gpus(replace(question, limit_seconds=60.0))
    assert looked[0] == 512 and late.num_devices in looked and len(looked) <= 12
    looked.clear()
    dear = plan_gpus(replace(question, limit_money=10.0))
    assert looked[0] == 1 and dear.num_devices in looked and len(looked) <= 6
    for plan, limit in ((late, "deadline of 1 min 00 s"), (dear, "budget of 10 USD")):
        (unmet,) = plan.unmet
        assert unmet.endswith(f"more than the {limit}")
        assert f"no number of devices does; {plan.num_devices} come closest: {unmet}" in plan.notes


def test_the_longest_samples_that_fit() -> None:
    question = ask("llama3-8b", "1x8:a100-80g", batch=8)
    plan = plan_seq(question)
    assert plan.best is not None and plan.seq % 1024 == 0
    beyond = make_plan(replace(question, seq=plan.seq + 1024))
    assert beyond.best is None and beyond.closest is not None
    because = f"because at {plan.seq + 1024} it {beyond.closest.because}"
    assert f"{plan.seq} positions are the most (in steps of 1024), {because}" in plan.notes


def test_the_longest_samples_of_a_written_layout_have_a_sample_for_each_rank() -> None:
    """The usual batch of these is less than 512: no longer ones were called possible, at a third of the memory."""
    layout = parse_layout("fsdp,recompute=full")
    plan = plan_seq(ask("llama3-8b", "64x8:h100", layout=layout, follows_length=True))
    assert plan.best is not None and plan.best.estimate.choice.global_batch == 512 and plan.seq > 32768
    assert any(f"at {plan.seq + 1024} it" in note for note in plan.notes)


def test_why_no_longer_samples_are_possible() -> None:
    def make(seq: int | None, precision: str) -> ModelProfile:
        heads = 8 if seq is not None and seq <= 4096 else 2
        return decoder(seq=seq or 1024, heads=heads, kv_heads=heads)

    plan = plan_seq(replace(ask(layout=parse_layout("tp=4,dp_shard=4"), batch=8), make_profile=make))
    (note,) = (note for note in plan.notes if "positions are the most" in note)
    assert plan.seq == 4096 and note.startswith("4096 positions are the most (in steps of 1024), because 5120 are ref")


@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_the_longest_samples_that_a_written_cp_cuts(context: str) -> None:
    """3 does not divide 1024 positions, which were said to be too long."""
    step = 3 * 1024
    layout = parse_layout("dp_shard=2,cp=3").model_copy(update={"context": context})
    plan = plan_seq(ask("gpt2", "1x6:h100", batch=12, layout=layout))
    assert plan.best is not None and plan.seq >= step and plan.seq % step == 0
    (note,) = (note for note in plan.notes if "positions are the most" in note)
    assert note.startswith(f"{plan.seq} positions are the most (in steps of {step}), because at {plan.seq + step} it ")


def test_samples_that_are_refused_are_not_called_too_long() -> None:
    plan = plan_seq(ask("llama3-8b", "1x6:h100", batch=6, layout=parse_layout("dp_shard=2,tp=3")))
    (note,) = (note for note in plan.notes if "1024 positions" in note)
    assert plan.leading is None
    assert note.startswith("samples of 1024 positions are refused, and no longer ones are looked at: tp=3 does not div")


def test_where_not_even_short_samples_fit() -> None:
    plan = plan_seq(ask("llama3-405b", "1x2:a100-80g", batch=8))
    assert plan.best is None and plan.seq == 1024
    assert any("1024 positions do not fit" in note for note in plan.notes)
