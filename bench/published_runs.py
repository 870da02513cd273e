"""Published runs as the planner sees them: a row as ModelProfile, Cluster and Setting."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from frameworks import mechanisms_of

from allranks.cluster import Cluster, Device, Link
from allranks.model_profile import ModelProfile
from allranks.model_shape import ModelShape
from allranks.planning.estimate import Cost, estimate_setting
from allranks.planning.setting import Recompute, Setting

Row = Mapping[str, Any]
GIB = float(2**30)

# Dense peaks from the vendors' data sheets, FLOP/s; memory in bytes and bytes/s.
A100 = {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}
HOPPER = {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 67e12}
BLACKWELL = {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12, "float4": 9000e12, "float32": 80e12}
GRACE = {"bfloat16": 2500e12, "float16": 2500e12, "float8": 5000e12, "float4": 10000e12, "float32": 80e12}
DEVICES: dict[str, tuple[str, float, Mapping[str, float]]] = {
    "V100-32GB-SXM": ("v100", 0.9e12, {"float16": 125e12, "float32": 15.7e12}),
    "A100-40GB-SXM": ("a100-40g", 1.555e12, A100),
    "A100-80GB-SXM": ("a100-80g", 2.039e12, A100),
    "H100-80GB-SXM": ("h100", 3.35e12, HOPPER),
    "H100-96GB-HBM2e": ("h100-96g", 2.4e12, HOPPER),
    "B200-SXM": ("b200", 8e12, BLACKWELL),
    "B300-SXM": ("b300", 8e12, BLACKWELL),
    "GB200": ("gb200", 8e12, GRACE),
    "GB300": ("gb300", 8e12, GRACE),
}


@cache
def _cluster(
    gpu: str, memory: float, nodes: int, per_node: int, inside: float, between: float, domain: int, bandwidth: float
) -> Cluster:
    name, memory_bandwidth, peaks = DEVICES[gpu]
    device = Device(name, gpu, memory * GIB, bandwidth or memory_bandwidth, peaks)
    return Cluster(
        name=f"{nodes}x{per_node}:{name}", nodes=nodes, devices_per_node=per_node, device=device,
        host_bandwidth=3.6e11 if gpu.startswith("GB") else None,  # NVLink-C2C, 900 GB/s for two devices, both ways
        inside=Link("nvlink", inside, 3e-6), between=Link("network", between, 1e-5), domain=domain,
    )  # fmt: skip


DEFAULT_NICS = {"a100": 25e9, "h100": 50e9, "b200": 50e9, "gb200": 50e9, "gb300": 100e9, "b300": 100e9, "v100": 12.5e9}


def cluster_of(row: Row) -> Cluster:
    """The row's hardware; a network that the source does not give is the usual one of that device's servers."""
    hardware = row["hardware"]
    gpu, per_node = hardware["gpu"], hardware["gpus_per_node"]
    devices = hardware["n_gpus"]
    per_node = min(per_node, devices)
    name = DEVICES[gpu][0].split("-")[0]
    between = hardware.get("inter_Gbps_per_gpu")
    between = between / 8 * 1e9 if between else DEFAULT_NICS[name]
    domain = hardware.get("nvlink_domain") or (72 if gpu.startswith("GB") else per_node)
    bandwidth = (hardware.get("hbm_TBps") or 0) * 1e12
    return _cluster(
        gpu, hardware["mem_gb"], math.ceil(devices / per_node), per_node, hardware["intra_GBps_per_dir"] * 1e9, between,
        domain, bandwidth,
    )  # fmt: skip


@cache
def _profile(shape: ModelShape, seq: int, precision: str, fused: bool) -> ModelProfile:
    return shape.profile(seq, precision, fused)


def shape_of(row: Row) -> ModelShape | None:
    """The row's model, its vocabulary padded as all these frameworks pad it; None where the row does not give its sizes."""
    model = row["model"]
    if not all(model.get(key) for key in ("layers", "hidden", "heads")):
        return None
    hidden = model["hidden"]
    gpt = model["arch"] == "gpt" and not model.get("gated")
    gated = bool(model.get("gated")) or model["arch"] not in ("gpt", "nemotron", "nemotron-h")
    dropout = gpt and row["source"] not in (
        "llm-foundry",
        "mcore-h100-weak",
        "mcore-h100-strong",
        "dgxc-benchmarking",
        "llm.c",
        "nanogpt",
    )
    given: dict[str, Any] = {}
    if model.get("experts"):
        given = {
            "experts": model["experts"], "top_k": model["top_k"], "expert_ffn": model.get("moe_ffn") or model.get("ffn") or 0,
            "shared_ffn": model.get("shared_ffn") or (model.get("shared_experts") or 0) * (model.get("moe_ffn") or 0),
            "dense_layers": model.get("dense_layers") or 0, "every": model.get("moe_every") or 1,
        }  # fmt: skip
    if model.get("kv_lora"):
        given |= {
            "query_rank": model.get("q_lora") or 0, "kv_rank": model["kv_lora"], "query_dim": model["qk_head_dim"],
            "rope_dim": model["qk_rope"], "value_dim": model["v_head_dim"],
        }  # fmt: skip
    return ModelShape(
        name=model["name"], layers=model["layers"], hidden=hidden, heads=model["heads"],
        kv_heads=0 if model.get("kv_lora") else model.get("kv_heads") or 0, ffn=model.get("ffn") or given.get("expert_ffn") or 4 * hidden,
        vocab=-(-(model.get("vocab") or 51200) // 128) * 128, seq=model["seq_len"], gated=gated, head_dim=model.get("head_dim") or 0,
        positions="learned" if gpt and "alibi" not in str(model.get("pos")) else "none" if gpt else "rotary",
        tied=gpt, bias=gpt, dropout=dropout, **given,
    )  # fmt: skip


def precision_of(row: Row) -> str:
    """As `train.precision`."""
    text = row["precision"].lower()
    if "fp4" in text:
        return "float4"
    return "float8" if "fp8" in text or "float8" in text else "bfloat16"


def chunks_of(row: Row) -> int:
    """Virtual stages; "one layer per chunk" is as many as a stage has layers."""
    vp, pp, layers = row["parallel"].get("vp"), row["parallel"]["pp"], row["model"].get("layers") or 1
    if isinstance(vp, str):
        return max(1, round((layers + 2) / pp))
    if vp is None and str(row["parallel"].get("schedule")).startswith("interleaved") and pp > 1:
        return max(1, min(layers // pp, 4))
    return int(vp or 1) if pp > 1 else 1


def micro_batch_of(row: Row) -> int:
    """The row's own; else torchtitan's default under a pipeline (as many micro-batches as stages); else 1."""
    parallel = row["parallel"]
    if parallel.get("mbs"):
        return int(parallel["mbs"])
    if "torchtitan" in row["framework"] and parallel["pp"] > 1:
        return max(1, int(parallel["gbs"] / parallel["dp"] / parallel["pp"]))
    return 1


def setting_of(row: Row) -> Setting | None:
    """The row's configuration; None where it leaves a degree or the batch open."""
    parallel = row["parallel"]
    if any(parallel.get(key) is None for key in ("dp", "tp", "pp", "gbs")):
        return None
    dp, cp, pp = parallel["dp"], parallel.get("cp") or 1, parallel["pp"]
    if parallel["gbs"] < dp and dp % parallel["gbs"] == 0:
        # A source that prints more replicas than samples has counted ranks of the context axis among them.
        dp, cp = parallel["gbs"], cp * dp // parallel["gbs"]
    zero = 3 if parallel.get("fsdp") else parallel.get("zero") or 0
    schedule = str(parallel.get("schedule") or "1f1b")
    how = mechanisms_of(row)
    keeps = "torchtitan" in row["framework"] and zero == 3 and pp > 1
    if keeps:  # its pipelines gather once a step, and reduce once
        how = replace(how, reduces_every_micro_step=False)
    return Setting(
        global_batch=parallel["gbs"], micro_batch=micro_batch_of(row), dp=dp, tp=parallel["tp"], cp=cp, pp=pp,
        ep=parallel.get("ep") or 1, shard=dp * cp if zero else 1, zero=zero, chunks=chunks_of(row),
        schedule="interleaved" if schedule.startswith("interleaved") else schedule.split("(", maxsplit=1)[0],
        recompute=recompute_of(row), precision=precision_of(row), frozen=row.get("task") == "lora",
        keeps_gathered=keeps, mechanisms=how,
    )  # fmt: skip


def recompute_of(row: Row) -> Recompute:
    """ "recipe-defined" and the like are none."""
    text = str(row.get("recompute"))
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def states_recompute(row: Row) -> bool:
    """Whether the source says what is computed again."""
    return bool(row.get("recompute")) and "recipe" not in str(row["recompute"])


def profile_of(row: Row) -> ModelProfile | None:
    """The row's model for its samples."""
    shape = shape_of(row)
    if shape is None:
        return None
    setting = setting_of(row)
    fused = setting is not None and setting.mechanisms.fusion < 1
    return _profile(shape, row["model"]["seq_len"], precision_of(row), fused)


def run_of(row: Row) -> tuple[ModelProfile, Cluster, Setting] | None:
    """What `estimate_setting` takes; None where the row leaves a size or a degree open.

    Where the source does not say what is computed again, it is the least that fits: none or full.
    """
    profile, setting = profile_of(row), setting_of(row)
    if profile is None or setting is None:
        return None
    cluster = cluster_of(row)
    setting = _with_micro_batch(row, profile, cluster, setting)
    if states_recompute(row):
        return profile, cluster, setting
    grace = row["hardware"]["gpu"].startswith("GB") and setting.zero == 3  # recipes keep activations on the host there
    for recompute, offload in (("none", "none"), *((("none", "activations"),) if grace else ()), ("full", "none")):
        tried = replace(setting, recompute=recompute, offload=offload)
        cost = estimate_setting(profile, cluster, tried)
        if cost.memory.total <= 1.15 * cost.capacity_bytes:
            return profile, cluster, tried
    return profile, cluster, setting


def _with_micro_batch(row: Row, profile: ModelProfile, cluster: Cluster, setting: Setting) -> Setting:
    """Where the source states no micro-batch: the fastest of 1, 2 and 4 that divides the batch and fits."""
    if row["parallel"].get("mbs") or ("torchtitan" in row["framework"] and setting.pp > 1):
        return setting
    tried = [setting]
    for size in (2, 4):
        if setting.global_batch % (setting.dp * size) == 0:
            bigger = replace(setting, micro_batch=size)
            cost = estimate_setting(profile, cluster, bigger)
            tried += [bigger] if cost.memory.total <= cost.capacity_bytes else []
    return min(tried, key=lambda one: estimate_setting(profile, cluster, one).time.total)


def memory_of(row: Row, cost: Cost) -> tuple[float | None, float]:
    """(What the row's source measured or None, the estimate of the same) in bytes.

    nvidia-smi sees the whole process (bloom-prequel); torch's peak of reserved memory sees no context; SimuMax prints
    the peak of what was allocated, on each rank.
    """
    metrics, used = row["metrics"], cost.memory.total - cost.context_bytes
    if metrics.get("mem_gib_reserved"):
        return metrics["mem_gib_peak"] * GIB, used
    if metrics.get("mem_gib_peak"):
        return metrics["mem_gib_peak"] * GIB, used + cost.slack_bytes
    if not metrics.get("mem_gb_peak"):
        return None, cost.peak_bytes.expected
    allocated = row["framework"] == "Megatron-LM fork"
    return metrics["mem_gb_peak"] * 1e9, used if allocated else cost.peak_bytes.expected


def rows_of(document: Mapping[str, Any]) -> Iterator[Row]:
    """Every row of a file; the single-node table's too, written out as rows."""
    yield from document["rows"]
    table = document.get("single_node_a100")
    if not table:
        return
    for number, values in enumerate(table["data"]):
        cells = dict(zip(table["columns"], values, strict=True))
        hidden = cells["hidden"]
        yield {
            "id": f"vtrain-single-{number}", "source": "vtrain-single", "quality": "A", "complete": True,
            "model": {
                "name": f"gpt-{hidden}-{cells['layers']}", "arch": "gpt", "layers": cells["layers"], "hidden": hidden,
                "heads": cells["heads"], "kv_heads": cells["heads"], "ffn": 4 * hidden, "gated": False,
                "seq_len": cells["seq"], "vocab": 51200,
            },
            "hardware": {
                "gpu": "A100-80GB-SXM", "mem_gb": 80, "n_gpus": cells["gpus"], "gpus_per_node": 8,
                "intra_GBps_per_dir": 300, "inter_Gbps_per_gpu": None,
            },
            "parallel": {
                "dp": cells["dp"], "tp": cells["tp"], "pp": cells["pp"], "cp": 1, "ep": 1, "vp": None, "sp": False,
                "zero": 0, "schedule": "1f1b" if cells["pp"] > 1 else None, "mbs": cells["mbs"], "gbs": cells["gbs"],
            },
            "precision": "fp16", "recompute": "full", "framework": "Megatron-DeepSpeed", "tags": [],
            "metrics": {"step_time_s": cells["iteration_ms"] / 1e3},
            "calculon_pred_s": cells["calculon_pred_ms"] / 1e3,
            "rank_group": f"single:{cells['gpus']}-{cells['gbs']}-{hidden}-{cells['layers']}-{cells['seq']}",
        }  # fmt: skip
