"""What saves memory: which changes, in which order, and what they cost of speed."""

import importlib
from dataclasses import replace

import pytest

from allranks.cli.rehearsed_question import Asked, question_of
from allranks.cli.remedies import Speed, changed, changes_of, find_remedies
from allranks.errors import LayoutError
from allranks.rehearsal import Rehearsal
from allranks.rehearsing import whole
from tests.test_rehearsal import rank, rehearsal

TASK = "tests.rehearsing.tasks:Tokens"
GPUS, PROCESSORS = "1x4:a100-80g", "1x4:cpu"


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


CHUNK = "task.chunk=1024"
RECOMPUTE = ["layout.recompute=selective", "layout.recompute=full"]


@pytest.mark.parametrize(
    ("cluster", "layout", "words", "changes"),
    [
        (
            GPUS,
            "ddp",
            (),
            [*RECOMPUTE, "train.micro_batch=1", "--layout dp_shard=4", "layout.offload=activations", CHUNK],
        ),
        (
            GPUS,
            "fsdp,sharding=grad_op",
            ("train.micro_batch=1",),
            [*RECOMPUTE, "--layout dp_shard=4", "layout.offload=parameters", "layout.offload=activations", CHUNK],
        ),
        (PROCESSORS, "tp=2,dp_replicate=2", ("train.micro_steps=2",), [*RECOMPUTE, "--layout dp_shard=2,tp=2", CHUNK]),
        (PROCESSORS, "fsdp,recompute=full", ("train.micro_batch=1", "task.chunk=1024"), []),
        (GPUS, "fsdp,recompute=full,offload=all", ("train.micro_batch=1", "task.chunk=8"), []),
    ],
)
def test_only_what_changes_something_is_tried(
    cluster: str, layout: str, words: tuple[str, ...], changes: list[str]
) -> None:
    assert changes_of(Asked((TASK, *words), cluster, layout)) == changes


@pytest.mark.parametrize(
    ("layout", "words", "tried"),
    [
        # A pipeline chooses how many micro-steps a step has: 4 of one sample here, and 4 of two.
        ("pp=2,dp_shard=2", ("train.global_batch=8",), []),
        ("pp=2,dp_shard=2", ("train.global_batch=16",), ["train.micro_batch=1"]),
        ("pp=4", ("train.global_batch=24", "train.micro_batch=6"), ["train.micro_batch=3"]),
        # A rank has no more than two samples: half of four is what it feeds already.
        ("ddp", ("train.global_batch=8", "train.micro_batch=4"), ["train.micro_batch=1"]),
        ("ddp", ("train.global_batch=4", "train.micro_batch=4"), []),
    ],
)
def test_half_a_micro_batch_is_half_of_what_the_layout_feeds(
    layout: str, words: tuple[str, ...], tried: list[str]
) -> None:
    found = changes_of(Asked((TASK, *words), GPUS, layout))
    assert [change for change in found if change.startswith("train.")] == tried


def test_a_name_has_chunks_of_the_loss() -> None:
    asked = Asked(("llama3-8b", "train.global_batch=4"), GPUS, "fsdp,recompute=full,offload=all")
    assert changes_of(asked) == ["task.chunk=1024"]
    assert changes_of(replace(asked, arguments=(*asked.arguments, "task.chunk=512"))) == []


@pytest.mark.parametrize(("chunk", "tried"), [(0, True), (2048, True), (1024, False)])
def test_a_task_that_declares_chunk_has_its_loss_in_chunks(chunk: int, tried: bool) -> None:
    asked = Asked((TASK, f"task.chunk={chunk}"), GPUS, "fsdp,recompute=full,offload=all")
    assert (CHUNK in changes_of(asked)) == tried


@pytest.mark.parametrize("task", ["Layered", "Restored"])
def test_a_task_without_chunk_has_none(task: str) -> None:
    asked = Asked((f"tests.rehearsing.tasks:{task}",), GPUS, "fsdp,recompute=full,offload=all")
    assert CHUNK not in changes_of(asked)


@pytest.mark.full
def test_the_chunks_of_a_task_are_rehearsed() -> None:
    """Beside logits of 2,048 positions and 8,192 words nothing of this model is large."""
    sizes = ("task.seq=2048", "task.vocab=8192", "task.layers=1", "train.global_batch=4", "train.micro_batch=1")
    asked = Asked((TASK, *sizes), GPUS, "fsdp,recompute=full,offload=all")
    told = whole.rehearse(question_of(asked))
    (chunks,) = find_remedies(asked, told)
    assert chunks.change == CHUNK and chunks.peak_bytes is not None
    peak = max(one.peak_bytes for one in told.ranks.values())
    # Logits of half of the positions in float32, and their gradients.
    assert peak - chunks.peak_bytes >= 1.5 * 1024 * 8192 * 4


def test_a_change_beats_the_layout_string() -> None:
    asked = Asked((TASK,), GPUS, "fsdp, recompute=none")
    assert changed(asked, "layout.recompute=full") == Asked((TASK, "layout.recompute=full"), GPUS, "fsdp")
    assert changed(asked, "--layout dp_shard=4") == Asked((TASK,), GPUS, "dp_shard=4")
    without = replace(asked, layout=None)
    assert changed(without, "train.micro_batch=1") == Asked((TASK, "train.micro_batch=1"), GPUS, None)


def test_the_cheapest_come_first_and_the_refused_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing takes the repeated forwards' time, as the planner has it; what saves nothing comes behind it."""

    def answer(question: whole.Question) -> Rehearsal:
        layout = question.layout
        if layout.offload != "none":
            raise LayoutError("not here")
        saves = layout.recompute == "full" or layout.dp_shard > 1
        return rehearsal(rank(question.ranks[0], 400 if saves else 600))

    monkeypatch.setattr(whole, "rehearse", answer)
    asked = Asked(("llama3-8b", "train.global_batch=8", "train.micro_batch=1", "task.chunk=64"), GPUS, "ddp")
    found = {one.change: one for one in find_remedies(asked, rehearsal(rank(0, 500), rank(3, 600)))}
    full, share = found["layout.recompute=full"], found["--layout dp_shard=4"]
    assert full.by == share.by == "estimate"
    assert full.slower is not None and share.slower is not None
    assert full.slower == pytest.approx(0.3, abs=0.1) and share.slower < full.slower
    assert [(change, one.peak_bytes, one.because) for change, one in found.items()] == [
        ("--layout dp_shard=4", 400, ""),
        ("layout.recompute=full", 400, ""),
        ("layout.recompute=selective", 600, ""),
        ("layout.offload=activations", None, "not here"),
    ]


def test_each_says_whether_it_fits_then_on_all_stages_beside_its_own_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing leaves the fullest stage less than the other one; halves of micro-batches leave a larger margin."""
    asked_for = []

    def answer(question: whole.Question) -> Rehearsal:
        asked_for.append(question.ranks)
        if question.layout.recompute == "full":
            told = rehearsal(replace(rank(0, 950)), replace(rank(3, 300), stage=1))
        else:
            told = replace(rehearsal(rank(0, 500), replace(rank(3, 700), stage=1)), margin_bytes=250.0)
        if question.layout.offload != "none":
            told = replace(told, host_capacity_bytes=-1.0)
        return told if question.layout.recompute != "selective" else replace(told, margin_bytes=300.0)

    monkeypatch.setattr(whole, "rehearse", answer)
    asked = Asked(
        ("llama3-8b", "train.global_batch=8", "train.micro_batch=2", "task.chunk=64"), GPUS, "pp=2,dp_shard=2"
    )
    told = rehearsal(rank(0, 900), rank(1, 899), replace(rank(3, 980), stage=1), replace(rank(2, 979), stage=1))
    found = {one.change: (one.peak_bytes, one.margin_bytes, one.fits) for one in find_remedies(asked, told)}
    assert set(asked_for) == {(0, 3)}, "the fullest rank of each stage"
    assert found["layout.recompute=full"] == (950, 100.0, False), "the first stage is the fullest then"
    assert found["layout.recompute=selective"] == (700, 300.0, True)
    assert found["train.micro_batch=1"] == (700, 250.0, True)
    assert found["layout.offload=activations"] == (700, 250.0, False), "the host has no room"


def test_what_the_planner_does_not_see_costs_its_flops() -> None:
    asked = Asked(("llama3-8b", "train.global_batch=8"), GPUS, "fsdp")
    question = question_of(asked)
    slower, by = Speed.of(question, 100.0).compare(question_of(changed(asked, "task.chunk=64")), 110.0)
    assert slower == pytest.approx(0.1) and by == "FLOPs"
    assert replace(Speed.of(question, 100.0), seconds=None).compare(question, 100.0) == (0.0, "FLOPs")


@pytest.mark.full
def test_each_is_rehearsed() -> None:
    asked = Asked((TASK, "train.global_batch=16", "task.seq=256"), GPUS, "ddp")
    told = whole.rehearse(question_of(asked))
    by_change = {remedy.change: remedy for remedy in find_remedies(asked, told)}
    assert set(by_change) == set(changes_of(asked))
    assert all(
        one.fits is True and one.margin_bytes > whole.CONTEXT_BYTES for one in by_change.values() if one.peak_bytes
    )
    margins = {change: one.margin_bytes for change, one in by_change.items()}
    assert margins["layout.recompute=selective"] > margins["train.micro_batch=2"]
    for change in ("layout.recompute=full", "train.micro_batch=2", "--layout dp_shard=4"):
        saved = by_change[change].peak_bytes
        assert saved is not None and saved < told.peak_bytes, change
