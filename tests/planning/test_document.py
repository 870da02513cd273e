"""plan.json and RUN.toml: what other programs and `allranks train` read."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from allranks.config import read_task_spec, resolve_config
from allranks.config_sections import AXES, LayoutConfig
from allranks.layout import Layout
from allranks.plan import Choice
from allranks.planning.answer import make_plan
from allranks.planning.document import layout_table, plan_document, run_toml
from allranks.planning.dry_run import DryRun
from tests.planning.questions import ask


def test_the_document_has_the_keys_that_stay() -> None:
    plan = make_plan(ask(tokens=1e9))
    document = json.loads(json.dumps(plan_document(plan), allow_nan=False))
    assert {"best", "others", "refusals"} <= set(document)
    for one in (document["best"], *document["others"]):
        assert {"layout", "fits", "peak_bytes", "step_seconds", "mfu", "because"} <= set(one)
        for span in (one["peak_bytes"], one["step_seconds"]):
            assert list(span) == ["low", "expected", "high"] and span["low"] <= span["expected"] <= span["high"]
    best = plan.best
    assert best is not None
    assert document["best"]["layout"] == str(best.estimate.choice.layout) and document["best"]["fits"] is True
    assert sum(document["best"]["seconds_by_cause"].values()) == pytest.approx(best.estimate.time.total)
    assert sum(document["best"]["bytes_by_category"].values()) == pytest.approx(best.estimate.memory.total)
    assert set(document["refusals"][0]) == {"rule", "layout", "because"}
    assert document["bill"]["tokens"] == 1e9 and document["fits"] is True


def test_the_stages_of_a_pipeline_are_there_first_middle_and_last() -> None:
    plan = make_plan(ask(where="1x8:a100-80g", layout=LayoutConfig(pp=4, dp_shard=2)))
    best = plan_document(plan)["best"]
    assert {0, 2, 3} <= {row["stage"] for row in best["stages"]}
    totals = [sum(row["bytes_by_category"].values()) for row in best["stages"]]
    assert max(totals) == pytest.approx(sum(best["bytes_by_category"].values())) and min(totals) < max(totals)
    assert plan_document(make_plan(ask(where="1x8:a100-80g", layout=LayoutConfig(dp_shard=8))))["best"]["stages"] == []


def test_what_dry_runs_said_is_told_beside_what_was_planned() -> None:
    answers = iter(["no rehearsal", DryRun(1e9, 2e9, {"weights": 1e9}), DryRun(fault="rank 3 waits; x")])
    plan = make_plan(ask(where="1x8:a100-80g", rehearse=lambda question, choice: next(answers, None)))
    unknown, stands, dropped = json.loads(json.dumps(plan_document(plan), allow_nan=False))["checked"]
    assert [one["outcome"] for one in (unknown, stands, dropped)] == ["not checked", "stands", "dropped"]
    assert unknown["because"] == "no rehearsal" and unknown["corrected"] is None and unknown["planned"]["fits"]
    assert stands["corrected"]["peak_bytes"]["expected"] == 3e9 and stands["traffic"] == {}
    assert stands["layout"] == stands["planned"]["layout"] and stands["micro_batch"] and stands["precision"]
    assert dropped["corrected"]["fits"] is False and dropped["because"] == "would fail: rank 3 waits; x"
    assert plan_document(make_plan(ask()))["checked"] == []


def test_what_does_not_fit_stands_as_the_best_with_fits_false() -> None:
    document = plan_document(make_plan(ask("llama3-70b", "1x4:a100-40g")))
    assert document["fits"] is False and document["best"]["fits"] is False


@pytest.mark.parametrize(
    "layout",
    [
        Layout(kind="single"),
        Layout(dp_replicate=8),
        Layout(dp_replicate=2, dp_shard=4, sharding="grad_op", recompute="full"),
        Layout(tp=2, pp=2, dp_shard=2, schedule="interleaved", recompute="selective"),
        Layout(cp=4, dp_replicate=2, context="ring", offload="activations"),
        Layout(dp_shard=8, sharding="optimizer"),
        Layout(dp_replicate=4, ep=2),
        Layout(dp_replicate=8, sharding="none"),
    ],
)
def test_the_run_file_means_the_layout(tmp_path: Path, layout: Layout) -> None:
    choice = Choice(layout, 64, 2, "bfloat16")
    (tmp_path / "RUN.toml").write_text(run_toml(choice, "../a b.py:Net", None, {"task.width": 3, "train.steps": 7}))
    config = resolve_config(task_defaults={}, toml=tmp_path / "RUN.toml", overrides=())
    assert Layout.resolve(config.layout, layout.world_size) == layout
    train = config.train
    assert (train.global_batch, train.micro_batch, train.precision, train.steps) == (64, 2, "bfloat16", 7)
    assert config.task == {"width": 3}
    assert read_task_spec(tmp_path / "RUN.toml") == f"{(tmp_path.parent / 'a b.py').resolve()}:Net"


_OTHERS: dict[str, dict[str, Any]] = {  # a value that is not the default, with what it needs beside it
    "kind": {"kind": "placement"},
    "dp_replicate": {"dp_replicate": 8},
    "dp_shard": {"dp_shard": 8},
    "tp": {"tp": 8},
    "cp": {"cp": 8},
    "pp": {"pp": 8},
    "ep": {"dp_replicate": 8, "ep": 4},
    "sharding": {"dp_shard": 8, "sharding": "grad_op"},
    "schedule": {"schedule": "zbv"},
    "recompute": {"recompute": "budget"},
    "offload": {"offload": "all"},
    "batchnorm": {"batchnorm": "local"},
    "compile": {"compile": "block"},
    "static_graph": {"static_graph": True},
    "gather": {"gather": "float32"},
    "prefetch": {"prefetch": 2},
    "ddp_bucket_mb": {"ddp_bucket_mb": 12.5},
    "ddp_hook": {"ddp_hook": "powersgd"},
    "powersgd_rank": {"powersgd_rank": 2},
    "powersgd_start": {"powersgd_start": 0},
    "local_sgd": {"local_sgd": 100},
    "outer_lr": {"outer_lr": 1.0},
    "outer_momentum": {"outer_momentum": 0.0},
    "outer_nesterov": {"outer_nesterov": False},
    "context": {"context": "ring"},
    "placement": {"placement": {"encoder.*": "cpu", "head": "cuda:1"}},
}


_MODES = [name for name in LayoutConfig.model_fields if not {*_OTHERS[name], name} & {*AXES}]


@pytest.mark.parametrize(
    ("name", "devices"), [*((name, 8) for name in LayoutConfig.model_fields), *((name, 1) for name in _MODES)]
)
def test_the_run_file_loses_no_key_of_a_layout(tmp_path: Path, name: str, devices: int) -> None:
    given = _OTHERS[name]
    degrees = {"dp_replicate": "*"} if name in _MODES else {}
    layout = Layout.resolve(LayoutConfig.model_validate({**degrees, **given}), devices)
    (tmp_path / "RUN.toml").write_text(run_toml(Choice(layout, 64, 2, "bfloat16"), None, None, {}))
    config = resolve_config(task_defaults={}, toml=tmp_path / "RUN.toml", overrides=()).layout
    assert Layout.resolve(config, devices) == layout
    assert getattr(config, name) != getattr(LayoutConfig(), name)


def test_one_process_that_drives_all_devices_keeps_its_kind() -> None:
    layout = Layout.resolve(LayoutConfig(kind="data_parallel", recompute="full"), 1)
    assert layout_table(layout) == {"kind": "data_parallel", "recompute": "full"}


def test_declared_micro_steps_take_the_place_of_a_micro_batch() -> None:
    text = run_toml(Choice(Layout(dp_replicate=2), 64, 32), None, 1, {})
    values: dict[str, Any] = tomllib.loads(text)
    assert values["train"] == {"global_batch": 64, "micro_steps": 1, "precision": "bfloat16"}
    assert "task" not in values


def test_one_process_is_written_as_one_copy() -> None:
    assert layout_table(Layout(kind="single")) == {"dp_replicate": 1}
