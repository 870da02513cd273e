"""A Plan as data: the JSON document of `--json` and plan.json, and the RUN.toml that `allranks train` takes."""

from dataclasses import asdict
from typing import Any

from allranks.config_sections import AXES, LayoutConfig
from allranks.config_toml import render_toml
from allranks.layout import Layout
from allranks.plan import Checked, Choice, Estimate, MemoryUse, Plan, Ranked, Span
from allranks.planning.reasons import bytes_by_category, seconds_by_cause

SCHEMA = 1
PLAN_FILE, RUN_FILE = "plan.json", "RUN.toml"


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object; docs/reference/plan.md says what each key means.

    `best` is what came nearest, with `fits` false, where nothing fits, and null where every layout is refused.
    """
    return {
        "schema": SCHEMA,
        "model": plan.model,
        "parameters": plan.parameters,
        "seq": plan.seq,
        "cluster": plan.cluster,
        "machine": plan.machine,
        "devices": plan.num_devices,
        "fits": plan.best is not None,
        "searched": plan.searched,
        "best": None if plan.leading is None else _ranked(plan.leading),
        "offloaded": None if plan.offloaded is None else _offloaded(plan.offloaded),
        "others": [_ranked(other) for other in plan.others],
        "refusals": [asdict(refusal) for refusal in plan.refusals],
        "what_ifs": [
            {
                "change": change.change,
                "because": change.because,
                "estimate": None if change.estimate is None else _estimate(change.estimate),
            }
            for change in plan.what_ifs
        ],
        "bill": None if plan.bill is None else {**asdict(plan.bill), "days": plan.bill.days},
        "unmet": list(plan.unmet),
        "checked": [_checked(one) for one in plan.checked],
        "notes": list(plan.notes),
    }


def _ranked(ranked: Ranked) -> dict[str, Any]:
    return {**_estimate(ranked.estimate), "because": ranked.because, "family": ranked.family}


def _offloaded(ranked: Ranked) -> dict[str, Any]:
    """`fits` is "unknown" where nobody says how much memory the hosts have, on which all of it stands."""
    document = _ranked(ranked)
    return {**document, "fits": "unknown"} if ranked.estimate.host_capacity_bytes is None else document


def _checked(one: Checked) -> dict[str, Any]:
    corrected = None if one.corrected is None else _estimate(one.corrected)
    return {
        "layout": str(one.planned.choice.layout),
        "micro_batch": one.planned.choice.micro_batch,
        "precision": one.planned.choice.precision,
        "outcome": one.outcome,
        "because": one.because,
        "traffic": dict(one.traffic),
        "planned": _estimate(one.planned),
        "corrected": corrected,
    }


def _estimate(found: Estimate) -> dict[str, Any]:
    choice = found.choice
    return {
        "layout": str(choice.layout),
        "fits": found.fits,
        "peak_bytes": _span(found.peak_bytes),
        "step_seconds": _span(found.step_seconds),
        "correction": found.correction,
        "mfu": found.mfu,
        "global_batch": choice.global_batch,
        "micro_batch": choice.micro_batch,
        "micro_steps": choice.micro_steps,
        "precision": choice.precision,
        "chunks": choice.chunks,
        "context": choice.layout.context if choice.layout.cp > 1 else None,
        "capacity_bytes": found.capacity_bytes,
        "bytes_by_category": bytes_by_category(found.memory),
        "stages": [{"stage": stage, "bytes_by_category": bytes_by_category(use)} for stage, use in _stages(found)],
        "seconds_by_cause": seconds_by_cause(found.time),
        "host_bytes": found.host_bytes,
        "host_capacity_bytes": found.host_capacity_bytes,
        "traffic": [asdict(traffic) for traffic in found.traffic],
        "samples_per_second": found.samples_per_second,
        "tokens_per_second": found.tokens_per_second,
    }


def _stages(found: Estimate) -> list[tuple[int, MemoryUse]]:
    return sorted(found.stages.items()) if found.choice.layout.pp > 1 else []


def _span(span: Span) -> dict[str, float]:
    return {"low": span.low, "expected": span.expected, "high": span.high}


def run_toml(choice: Choice, task: str | None, micro_steps: int | None, settings: dict[str, object]) -> str:
    """RUN.toml: what `allranks train` needs to run this choice.

    Args:
        task: its spec; None where the model has no Task, so that the command line names one.
        micro_steps: of a Task that takes them in the place of a micro-batch.
        settings: `task.*` and other keys that the user gave, by full key; they are kept.
    """
    cut = {"micro_steps": micro_steps} if micro_steps is not None else {"micro_batch": choice.micro_batch}
    tables: dict[str, dict[str, object]] = {}
    for name, value in settings.items():
        section, _, leaf = name.partition(".")
        tables.setdefault(section, {})[leaf] = value
    tables["train"] = {
        **tables.get("train", {}), "global_batch": choice.global_batch, **cut, "precision": choice.precision
    }  # fmt: skip
    tables["layout"] = {**tables.get("layout", {}), **layout_table(choice.layout)}
    if task is not None:
        tables = {"task": {"spec": task, **tables.pop("task", {})}, **tables}
    return render_toml(tables)


def layout_table(layout: Layout) -> dict[str, object]:
    """The table `[layout]` that means `layout`: its kind and degrees, and the modes that are not the default."""
    usual = LayoutConfig()
    kind: dict[str, object] = {"kind": layout.kind} if layout.kind in ("data_parallel", "placement") else {}
    degrees: dict[str, object] = {name: getattr(layout, name) for name in AXES if getattr(layout, name) > 1}
    if not degrees and not kind:
        degrees = {"dp_replicate": 1}
    shared = {"sharding": layout.sharding} if layout.dp_shard > 1 or layout.sharding == "none" else {}
    modes = [name for name in LayoutConfig.model_fields if name not in (*AXES, "kind", "sharding", "placement")]
    found = {name: getattr(layout, name) for name in modes if getattr(layout, name) != getattr(usual, name)}
    placed: dict[str, object] = {"placement": dict(layout.placement)} if layout.placement else {}
    return {**kind, **degrees, **shared, **found, **placed}
