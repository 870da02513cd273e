"""Stages as the engine cuts them: the same blocks on every rank as the modules themselves are given."""

import importlib
from dataclasses import replace
from functools import cache

import pytest
import torch

from allranks.layout import Layout
from allranks.models.transformer import Transformer
from allranks.named_models import find_model
from allranks.parallel.precision import choose_precision
from allranks.parallel.stage_plan import plan_stages
from allranks.plan import Choice
from allranks.planning.setting import Setting, setting_of
from allranks.planning.stages import stages_under
from allranks.stepping.stage_cost import count_between
from tests.planning.profiles import decoder
from tests.rehearsing.tasks import Tokens


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Tensors without memory import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


@cache
def built(tied: bool, seq: int) -> tuple[Transformer, list[float]]:
    """The model, and what the engine counts between its layers."""
    with torch.device("meta"):
        sizes = {"ffn": 128, "max_seq": seq, "num_kv_heads": 8}
        model = Transformer(1000, 11, 64, 8, tied=tied, **sizes)
    task, precision = Tokens(seq=seq), choose_precision("bfloat16", None, "cpu")
    names = [f"layers.{number}" for number in range(11)]
    return model, count_between(task, task.dataset("train"), 0, precision, model, names)


def blocks_of_engine(tied: bool, pp: int, schedule: str, seq: int, counted: bool) -> list[int]:
    (model, costs), layout = built(tied, seq), Layout(pp=pp, schedule=schedule)
    count = (lambda module, names: list(costs)) if counted else None
    plan = plan_stages(model, layout.stage_ranks, ("layers.*",), count=count)
    counts = [0] * pp
    for number in range(11):
        name = f"layers.{number}"
        counts[layout.stage_rank(plan.homes[name])] += 1
    return counts


@pytest.mark.sample(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("seq", "counted"), [(8, True), (512, True), (512, False)])
@pytest.mark.parametrize(
    ("pp", "schedule"), [(2, "1f1b"), (3, "1f1b"), (4, "gpipe"), (2, "interleaved"), (2, "zbv"), (4, "dualpipev")]
)
def test_every_rank_has_the_blocks_that_the_engine_gives_it(
    tied: bool, pp: int, schedule: str, seq: int, counted: bool
) -> None:
    layout = Layout(pp=pp, schedule=schedule)
    profile = find_model("llama3-8b", layers=11, hidden=64, heads=8, ffn=128, vocab=1000, tied=tied).profile(seq)
    if not counted:
        profile = replace(profile, source="measured")
    setting = setting_of(Choice(layout, 8, 1, chunks=layout.num_stages // pp))
    held = stages_under(profile, setting)
    assert [stage[1] for stage in held] == blocks_of_engine(tied, pp, schedule, seq, counted)
    assert [stage[0] for stage in held] == [1] + [0] * (pp - 1)
    last = layout.stage_rank(layout.num_stages - 1)
    assert [stage[2] for stage in held] == [int(rank == last) for rank in range(pp)]


def test_others_have_equally_many_blocks() -> None:
    profile = decoder(layers=8, vocab=4096)
    assert [stage[1] for stage in stages_under(profile, Setting(8, 1, pp=2))] == [4, 4]


def test_one_stage_has_all() -> None:
    assert stages_under(decoder(layers=8), setting_of(Choice(Layout(), 8, 1))) == ((1, 8, 1),)
