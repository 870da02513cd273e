"""Published runs as the planner sees them: a row as ModelProfile, Cluster and Setting."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from frameworks import mechanisms_of
from published_models import Row, is_tf32, precision_of, profile_of

from allranks.cluster import Cluster, Device, Link
from allranks.errors import ConfigError
from allranks.model_profile import ModelProfile
from allranks.planning.assembly import find_fabric, nodes_of_rack
from allranks.planning.catalog import find_device, find_link, tidy
from allranks.planning.estimate import Cost, estimate_setting
from allranks.planning.setting import Recompute, Setting

GIB = float(2**30)

OMNI_PATH = 0.6  # it has no GPUDirect: what devices send passes through the host, twice over the same PCIe lanes
FLOAT32: Mapping[str, Any] = {
    "weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8, "gather_bytes": 4, "reduce_bytes": 4, "cast_bytes": 0,
    "step_bytes": 0,
}  # fmt: skip
NETWORKS = {"v100": 12.5e9, "a100": 25e9}  # bytes/s of a device where a source gives none: its usual servers


def device_name(gpu: str) -> str:
    """The catalog's name of a device as sources write it: "A100-80GB-SXM" is a100-80g. Raises ConfigError."""
    name = re.sub(r"(\d+)gb\b", r"\1g", tidy(gpu))
    plain = re.sub(r"-(sxm\d?|nvl72|nvl|hbm\d\w?)\b", "", name)
    family = plain.split("-")[0] + ("-pcie" if "pcie" in name else "")
    for spelling in (name, plain, family):
        with suppress(ConfigError):
            return find_device(spelling).device.name
    return find_device(plain).device.name


def in_tf32(device: Device) -> Device:
    """With products of float32 at the rate of TF32: half of bfloat16's on every NVIDIA device that has both.

    NVIDIA's data sheets: A100 156 and 312 TFLOP/s, H100 494.7 and 989.4, L40S 183 and 362. Others are left as they are.
    """
    half = device.peak_flops.get("bfloat16", 0.0) / 2
    if not device.label.startswith("NVIDIA") or half <= device.peak_flops.get("float32", 0.0):
        return device
    return replace(device, peak_flops={**device.peak_flops, "float32": half})


@cache
def _cluster(
    gpu: str, memory: float, nodes: int, per_node: int, inside: float | None, between: float | None, domain: int | None,
    bandwidth: float | None, tf32: bool,
) -> Cluster:  # fmt: skip
    known = find_device(device_name(gpu))
    device = known.device if bandwidth is None else replace(known.device, memory_bandwidth=bandwidth)
    device = in_tf32(device) if tf32 else device
    if abs(memory * GIB / device.memory_bytes - 1) > 0.05:
        device = replace(device, memory_bytes=memory * GIB)
    near, far = find_link(known.inside), find_fabric(known.between)
    family = device.name.split("-")[0]
    return Cluster(
        name=f"{nodes}x{per_node}:{device.name}",
        nodes=nodes,
        devices_per_node=per_node,
        device=device,
        inside=near if inside is None or abs(inside / near.bandwidth - 1) < 0.1 else Link("inside", inside, 3e-6),
        between=Link("network", between or NETWORKS.get(family, far.bandwidth), far.latency_seconds),
        domain=_domain(nodes, per_node, domain or (known.domain if known.domain > known.devices_per_node else 0)),
        host_bandwidth=known.host_bandwidth,
    )


def _domain(nodes: int, per_node: int, joined: int) -> int:
    """Devices of a run that one of its racks joins, which joins so many; a node's where there is none."""
    return per_node * nodes_of_rack(nodes, joined // per_node) if joined > per_node else joined or per_node


def cluster_of(row: Row) -> Cluster:
    """The row's hardware; a network that the source does not give is the usual one of that device's servers."""
    hardware = row["hardware"]
    devices = hardware["n_gpus"]
    per_node = min(hardware.get("gpus_per_node") or 8, devices)
    inside, between = hardware.get("intra_GBps_per_dir"), hardware.get("inter_Gbps_per_gpu")
    if between and "Omni-Path" in str(hardware.get("inter_note")):
        between *= OMNI_PATH
    bandwidth = hardware.get("hbm_TBps")
    return _cluster(
        hardware["gpu"], hardware["mem_gb"], math.ceil(devices / per_node), per_node, inside and inside * 1e9,
        between and between / 8 * 1e9, hardware.get("nvlink_domain"), bandwidth and bandwidth * 1e12,
        is_tf32(row),
    )  # fmt: skip


def chunks_of(row: Row) -> int:
    """Virtual stages; "one layer per chunk" is as many as a stage has layers."""
    pp: int = row["parallel"]["pp"]
    vp, layers = row["parallel"].get("vp"), int(row["model"].get("layers") or 1)
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
    if precision_of(row) == "float32":  # no copies in another type: weights, gradients and two averages
        how = replace(how, **FLOAT32)
    moved = float(parallel.get("activation_offload") or 0.0)
    if moved:
        how = replace(how, offloaded_share=min(1.0, moved))
    keeps = "torchtitan" in row["framework"] and zero == 3 and pp > 1
    if keeps:  # its pipelines gather once a step, and reduce once
        how = replace(how, reduces_every_micro_step=False)
    # A source's copies may shard among themselves (HSDP), or the optimizer alone within groups.
    group = (parallel.get("fsdp") if zero == 3 else parallel.get("zero_group")) or dp * cp
    shard = group if zero and (dp * cp) % group == 0 else dp * cp if zero else 1
    said = f"{row['framework']} {row.get('notes')} {parallel.get('cp_kind')}".lower()
    return Setting(
        global_batch=parallel["gbs"], micro_batch=micro_batch_of(row), dp=dp, tp=parallel["tp"], cp=cp, pp=pp,
        ep=parallel.get("ep") or 1, shard=shard, zero=zero, chunks=chunks_of(row), ring="ulysses" not in said,
        schedule="interleaved" if schedule.startswith("interleaved") else schedule.split("(", maxsplit=1)[0],
        recompute=recompute_of(row), precision=precision_of(row), frozen=row.get("task") == "lora",
        keeps_gathered=keeps, offload=_offload_of(parallel), mechanisms=how,
    )  # fmt: skip


def _offload_of(parallel: Mapping[str, Any]) -> str:
    activations = "activations" if parallel.get("activation_offload") else "none"
    return activations if not parallel.get("cpu_offload") else "parameters" if activations == "none" else "all"


def recompute_of(row: Row) -> Recompute:
    """ "recipe-defined" and the like are none; true is all of it, as frameworks' switches mean it."""
    text = "full" if row.get("recompute") is True else str(row.get("recompute"))
    return "full" if text.startswith("full") else "selective" if text.startswith("selective") else "none"


def states_recompute(row: Row) -> bool:
    """Whether the source says what is computed again."""
    given = row.get("recompute")
    return isinstance(given, bool) or (bool(given) and "recipe" not in str(given))


def run_of(row: Row) -> tuple[ModelProfile, Cluster, Setting] | None:
    """What `estimate_setting` takes; None where the row leaves a size or a degree open.

    Where the source does not say what is computed again, it is the least that fits: none or full.

    Raises:
        ConfigError: the catalog does not have the device.
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
        if cost.room.memory.total <= 1.15 * cost.room.capacity_bytes:
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
            tried += [bigger] if cost.room.memory.total <= cost.room.capacity_bytes else []
    return min(tried, key=lambda one: estimate_setting(profile, cluster, one).time.total)


def memory_of(row: Row, cost: Cost) -> tuple[float | None, float]:
    """(What the row's source measured or None, the estimate of the same) in bytes.

    nvidia-smi sees the whole process (bloom-prequel); torch's peak of reserved memory sees no context; SimuMax prints
    the peak of what was allocated, on each rank.
    """
    metrics, used = row["metrics"], cost.room.memory.total - cost.room.memory.framework
    if metrics.get("mem_gib_reserved") and metrics.get("mem_gib_peak"):
        return metrics["mem_gib_peak"] * GIB, used
    if metrics.get("mem_gib_peak"):
        return metrics["mem_gib_peak"] * GIB, used + cost.room.slack_bytes
    if not metrics.get("mem_gb_peak"):
        return None, cost.room.peak_bytes.expected
    allocated = row["framework"] == "Megatron-LM fork"
    return metrics["mem_gb_peak"] * 1e9, used if allocated else cost.room.peak_bytes.expected


def rows_of(document: Mapping[str, Any]) -> Iterator[Row]:
    """Every row of a file; the single-node table's too, written out as rows."""
    yield from document["rows"]
    untimed = document.get("memory_only")
    if isinstance(untimed, Mapping) and isinstance(untimed.get("rows"), list):  # of the same kind, without a time
        yield from untimed["rows"]
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
