"""The machine at hand as a Cluster, without torch: what its drivers say, and what was measured on it."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import final

from allranks.cluster import Cluster, Device, Link
from allranks.errors import ConfigError
from allranks.home_directory import user_folder
from allranks.planning.assembly import build_cluster
from allranks.planning.catalog import find_device, find_device_by_driver_name
from allranks.planning.cluster_file import read_cluster
from allranks.planning.corrections import corrected
from allranks.planning.driver import driver_devices
from allranks.process_environment import num_cores

# Where nothing was measured: one core of a small cloud machine, with care.
CORE_FLOPS: Mapping[str, float] = {"float32": 20e9, "bfloat16": 10e9, "float16": 2e9, "float64": 10e9}
CORE_BANDWIDTH = 4e9
LOOPBACK_BANDWIDTH, LOOPBACK_LATENCY = 1e9, 50e-6
HOST_COPY_BANDWIDTH = 4e9
CONTEXT_BYTES = 0.4e9  # a process that has imported torch 2.13 and joined a group of gloo


@final
@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a calibration is kept under.

    Attributes:
        processor: its model as the system names it; cores: that this process may use.
        memory_bytes: of the host, or of this container where it may take less.
        devices: what the driver calls each accelerator that this process may use; () without any.
        unnamed: why accelerators that are there are not in `devices`; "" where none is missing.
    """

    processor: str
    cores: int
    memory_bytes: float
    devices: tuple[str, ...]
    unnamed: str = ""


@cache
def look() -> MachineFacts:
    """This machine, looked at once a process."""
    from allranks.free_memory import whole_host_bytes

    return MachineFacts(_processor(), num_cores(), float(whole_host_bytes()), *driver_devices())


def calibrated_path(kind: str, count: int, facts: MachineFacts | None = None) -> Path:
    """Where the measured Cluster of `count` devices of this machine is kept; `kind` is a device's name, or "cpu"."""
    return clusters_directory() / f"{_slug(kind)}-x{count}-{machine_slug(facts or look())}.toml"


def calibrated_files(facts: MachineFacts | None = None) -> list[Path]:
    """The cluster files that were measured on machines like this one."""
    end = f"-{machine_slug(facts or look())}.toml"
    try:
        return sorted(path for path in clusters_directory().glob("*.toml") if path.name.endswith(end))
    except PermissionError:  # HOME is somebody else's, such as /root: nothing there is this user's
        return []


def clusters_directory() -> Path:
    """The user's configuration directory (XDG base directory specification), `allranks/clusters` in it."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "allranks" / "clusters"


def corrections_path(facts: MachineFacts | None = None) -> Path:
    """Where it is kept what runs on this machine took beside what was calculated for them."""
    return clusters_directory() / f"runs-{machine_slug(facts or look())}.json"


def _cpu_files(facts: MachineFacts) -> list[tuple[Path, re.Match[str]]]:
    """The measured files of processes on the CPU, each with the match whose first group is their number."""
    found = [(path, re.match(r"cpu-x(\d+)-", path.name)) for path in calibrated_files(facts)]
    return [(path, match) for path, match in found if match is not None]


def machine_slug(facts: MachineFacts) -> str:
    """A machine's name in files: its processor and the cores that a process may use."""
    return f"{_slug(facts.processor)}-{facts.cores}cores"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def local_cluster(processes: int | None = None) -> Cluster:
    """This machine: its accelerators, or its cores where it has none; measured figures where there are some.

    Args:
        processes: of its accelerators so many, where they were measured; else all.

    Raises:
        ConfigError: its accelerator is not in the catalog and was not measured, or its accelerators differ, or nobody
            says what they are.
    """
    facts = look()
    if facts.unnamed:
        raise ConfigError(
            f"cluster 'local': this machine has GPUs, but {facts.unnamed}; name the cluster (--cluster 1x8:h100), or "
            "measure it and name the file: allranks doctor --calibrate"
        )
    if not facts.devices:
        return cpu_cluster(1, facts.cores, None, name="local")
    kinds = sorted(set(facts.devices))
    if len(kinds) > 1:
        raise ConfigError(
            f"cluster 'local': the devices differ ({', '.join(kinds)}); choose equal ones by CUDA_VISIBLE_DEVICES"
        )
    count, name = len(facts.devices), find_device_by_driver_name(kinds[0])
    for number in (processes or count, count):
        measured = calibrated_path(name or kinds[0], number)
        if os.path.isfile(measured):  # False also where this user may not look
            return _limited(_as_run(replace(_kept(measured), name="local"), facts), facts)
    if name is None:
        raise ConfigError(
            f"cluster 'local': '{kinds[0]}' is not in the catalog; measure it: allranks doctor --calibrate"
        )
    found = build_cluster("local", 1, count, find_device(name), None)
    note = f"figures of the catalog's {name}, because nobody measured this machine yet: allranks doctor --calibrate"
    return _as_run(replace(found, host_memory_bytes=facts.memory_bytes, notes=(*found.notes, note)), facts)


def cpu_cluster(nodes: int, devices: int, fabric: Link | None, *, name: str, calibrated: bool = True) -> Cluster:
    """Nodes like this machine, `devices` processes on each: as measured with as many or about as many, or a guess.

    Args:
        calibrated: whether measured figures, and what runs took, are looked for. What the figures are is in the notes.
    """
    facts = look()
    found = _measured_cpu(devices, facts) if calibrated else None
    if found is None:
        found = _guess_cpu(devices, facts)
    notes = found.notes if nodes == 1 else (*found.notes, _fabric_note(fabric))
    found = replace(found, name=name, nodes=nodes, between=fabric or found.between, notes=notes)
    return _limited(_as_run(found, facts) if calibrated and nodes == 1 else found, facts)


def guess_link() -> Link:
    """What gloo over the loopback of any machine reaches, with care."""
    return Link("loopback", LOOPBACK_BANDWIDTH, LOOPBACK_LATENCY, source="a careful guess for gloo on one machine")


def _guess_cpu(devices: int, facts: MachineFacts) -> Cluster:
    cores = _cores_each(devices, facts)
    device = Device(
        name="cpu",
        label=f"{facts.processor}, one of {devices} processes",
        memory_bytes=_memory_each(devices, facts),
        memory_bandwidth=CORE_BANDWIDTH * cores,
        peak_flops={precision: rate * cores for precision, rate in CORE_FLOPS.items()},
        context_bytes=CONTEXT_BYTES,
        cores=_cores_each(devices, facts),
        source="a careful guess for one core of this machine",
    )
    note = (
        f"figures of the processor are a careful guess, because {devices} processes were not measured on this machine:"
        f" allranks doctor --calibrate --nproc {devices}"
    )
    return Cluster(
        name="local",
        nodes=1,
        devices_per_node=devices,
        device=device,
        inside=guess_link(),
        between=guess_link(),
        domain=devices,
        host_memory_bytes=facts.memory_bytes,
        host_bandwidth=HOST_COPY_BANDWIDTH,
        notes=(note,),
    )


def _measured_cpu(devices: int, facts: MachineFacts) -> Cluster | None:
    """What was measured with so many processes, or with the nearest number, its rates shared anew."""
    counts = {int(match[1]): path for path, match in _cpu_files(facts)}
    if not counts:
        return None
    nearest = min(counts, key=lambda count: (abs(count - devices), count))
    found = _kept(counts[nearest])
    if nearest == devices:
        return found
    share = _cores_each(devices, facts) / _cores_each(nearest, facts)
    moved = min(1.0, nearest / devices)
    old = found.device
    device = replace(
        old,
        label=f"{facts.processor}, one of {devices} processes",
        memory_bytes=_memory_each(devices, facts),
        memory_bandwidth=old.memory_bandwidth * moved,
        peak_flops={name: rate * share for name, rate in old.peak_flops.items()},
        matmul_flops={name: rate * share for name, rate in old.matmul_flops.items()},
        matmul_shapes={
            name: tuple((m, k, n, rate * share) for m, k, n, rate in rows) for name, rows in old.matmul_shapes.items()
        },
        update_rate=None if old.update_rate is None else old.update_rate * moved,
        pass_rates=tuple((size, rate * moved) for size, rate in old.pass_rates),
        cores=_cores_each(devices, facts),
    )
    note = (
        f"figures are those of {nearest} processes, the cores shared by {devices}, because {devices} were not measured:"
        f" allranks doctor --calibrate --nproc {devices}"
    )
    return replace(found, devices_per_node=devices, domain=devices, device=device, notes=(*found.notes, note))


def _as_run(cluster: Cluster, facts: MachineFacts) -> Cluster:
    return corrected(cluster, machine_slug(facts), corrections_path(facts))


def _limited(cluster: Cluster, facts: MachineFacts) -> Cluster:
    """With no more memory than this machine has now: it may have been measured outside of a container's limit.

    What runs took is kept under the figures of the file, which this leaves alone.
    """
    host, device = cluster.host_memory_bytes, cluster.device
    if device.kind == "cpu":
        device = replace(device, memory_bytes=min(device.memory_bytes, _memory_each(cluster.devices_per_node, facts)))
    return replace(cluster, device=device, host_memory_bytes=min(host or facts.memory_bytes, facts.memory_bytes))


def _kept(path: Path) -> Cluster:
    """A measured Cluster, and why it is taken."""
    found = read_cluster(path)
    return replace(found, notes=(*found.notes, f"figures as measured, because this machine's are kept in {path}"))


def _cores_each(processes: int, facts: MachineFacts) -> float:
    """The cores that one of so many processes computes with: whole ones, or a part of one."""
    return float(facts.cores // processes) if processes <= facts.cores else facts.cores / processes


def _memory_each(processes: int, facts: MachineFacts) -> float:
    return float(int(facts.memory_bytes / processes))


def _fabric_note(fabric: Link | None) -> str:
    if fabric is not None:
        return f"fabric {fabric.name} between nodes, because the string says so"
    return "nodes are taken as joined as fast as processes of one machine, because no fabric was named: @FABRIC"


def _processor() -> str:
    """The model of the processor: "Intel(R) Xeon(R) Platinum 8581C CPU @ 2.10GHz"."""
    if sys.platform == "linux":
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        if found := re.search(r"^(?:model name|Model|cpu)\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()
