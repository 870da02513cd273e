"""The reference page of clusters: strings, every key of a cluster file with its unit, and the catalog with sources."""

import types
import typing
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal

from pydantic.fields import FieldInfo

from allranks.planning import catalog
from allranks.planning.assembly import find_fabric
from allranks.planning.cluster_file import ClusterTable
from allranks.planning.cluster_tables import DeviceTable, LinkTable, Table
from allranks.planning.hardware import FORM

UNITS = {
    "memory_gb": "1e9 bytes",
    "host_memory_gb": "1e9 bytes",
    "memory_mib": "2^20 bytes",
    "bandwidth_gb_per_s": "1e9 bytes/s",
    "host_bandwidth_gb_per_s": "1e9 bytes/s",
    "storage_gb_per_s": "1e9 bytes/s",
    "gbit_per_s": "1e9 bits/s",
    "peak_tflops": "1e12 FLOP/s",
    "matmul_tflops": "1e12 FLOP/s",
    "matmul_shapes_tflops": "1e12 FLOP/s",
    "kernel_microseconds": "1e-6 s",
    "pass_gb_per_s": "1e9 bytes/s",
    "context_mb": "1e6 bytes",
    "cores": "cores",
    "fixed_microseconds": "1e-6 s",
    "latency_microseconds": "1e-6 s",
    "bytes_microseconds": "bytes, 1e-6 s",
    "update_gparameters_per_s": "1e9 parameters/s",
    "price_per_device_hour": "currency/h",
    "watts_per_device": "W",
    "nodes": "nodes",
    "devices_per_node": "devices",
    "domain": "devices",
}

INTRODUCTION = f"""\
What a plan is for: a string on the command line, or a TOML file ([how](../how-to/describe-your-cluster.md)).

## Strings

`{FORM}`. Upper and lower case are one; `_` and blanks are hyphens.

| string | what it is |
|---|---|
| `4:h100` | one node of four |
| `8x8:a100-80g@hdr200` | eight nodes of eight, each device with its own 200 Gbit/s adapter |
| `8x8:h100@400g` | 400 Gbit/s a device, of any kind |
| `2x8:h100` | the fabric that the vendor's node has; the plan says which, and because |
| `1x2:cpu` | two processes on this machine's processor |
| `local` | this machine: its GPUs, or a process a core |
| `cluster.toml` | a cluster file |

`local` and `cpu` take what `allranks doctor --calibrate` measured on this machine, where it did; else the catalog's
figures, or a careful guess, and the plan says so. What was measured lies in `$XDG_CONFIG_HOME/allranks/clusters`
(`~/.config/allranks/clusters`), a file for each kind and number of devices, processor and number of cores: another
machine that shares the home directory has its own.

## Cluster files

An unknown key is an error that names the nearest one. Figures that no machine has are refused, with the unit that they
were probably written in. Figures that a machine could have, and that are more probably in another unit or of something
else, are noted in every plan. Only what is marked is needed.
"""

DEVICE = """\
A name of the catalog (`device = "h100"`), or a table; with `like = "h100"` it takes from the catalog what is not given.
"""

LINKS = """\
The link between the devices of a node (or of a `domain`), and the one between nodes: a name of the catalog, a figure
such as `"400g"` between nodes, or a table, also with `like`. Of a catalog device both may be left out. A table needs no
`name`, and no latency: NVLink's or InfiniBand's is taken.
"""

TABLES = (
    ("Above all tables", ClusterTable, ""),
    ("`device`", DeviceTable, DEVICE),
    ("`inside` and `between`", LinkTable, LINKS),
)


def render_clusters(note: str) -> str:
    """The page; `note` says who writes it."""
    lines = [f"# Clusters\n\n{note}{INTRODUCTION}"]
    for heading, table, words in TABLES:
        lines += [f"### {heading}", "", *([words] if words else []), *_keys(table), ""]
    return "\n".join([*lines, *_devices(), "", *_links()]) + "\n"


def _keys(table: type[Table]) -> Iterator[str]:
    yield "| key | expected | unit | default | what it is |"
    yield "|---|---|---|---|---|"
    optional = {"name", "latency_microseconds"} if table is LinkTable else set()
    for name, field in table.model_fields.items():
        number = "number" in _expected(field.annotation) and name != "notes"
        unit = UNITS[name] if number else ""
        default = "**needed**" if field.is_required() and name not in optional else _default(field)
        yield f"| `{name}` | {_expected(field.annotation)} | {unit} | {default} | {field.description} |"


def _default(field: FieldInfo) -> str:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    match default:
        case bool():
            return f"`{str(default).lower()}`"
        case str() if default:
            return f'`"{default}"`'
    return "-"


def _expected(annotation: Any) -> str:
    """What a value is, in words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _expected(next(part for part in inner if part is not type(None)))
    if origin is typing.Annotated:
        return _expected(inner[0])
    if origin is dict:
        keys = ", ".join(f"`{word}`" for word in typing.get_args(inner[0])) if _is_literal(inner[0]) else "group size"
        return f"a table of {keys}: {_expected(inner[1])}"
    if origin is list:
        return "a list of texts" if inner[0] is str else "rows of numbers"
    return {int: "a whole number > 0", Decimal: "a number > 0", str: "text", bool: "`true` or `false`"}[annotation]


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Literal


def _devices() -> Iterator[str]:
    yield "## Devices of the catalog"
    yield ""
    yield (
        "Peaks are dense, at bfloat16 (float16 where there is none). Inside and between are what a string without `@`"
        " takes. Host GB is a device's share of its host's memory in the node that the source describes: nodes of a"
        " string are taken to have as much for each of their devices; `-` is not known. There are no prices and no"
        " watts in the catalog: they are yours to give."
    )
    yield ""
    yield "| name | also | device | memory GB | GB/s | TFLOP/s | measured | host GB | inside | between | source |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for name in catalog.device_names():
        found = catalog.find_device(name)
        device = found.device
        precision = "bfloat16" if "bfloat16" in device.peak_flops else "float16"
        best = device.matmul_flops.get(precision)
        cells = [
            f"`{name}`",
            ", ".join(f"`{other}`" for other in catalog.device_aliases(name)),
            device.label,
            f"{device.memory_bytes / 1e9:.1f}",
            f"{device.memory_bandwidth / 1e9:g}",
            f"{device.peak_flops[precision] / 1e12:g}",
            "-" if best is None else f"{best / 1e12:g}",
            "-" if device.host_memory_bytes is None else f"{device.host_memory_bytes / 1e9:g}",
            f"`{found.inside}`",
            f"`{found.between}`: {found.because}",
            device.source,
        ]
        yield "| " + " | ".join(cells) + " |"


def _links() -> Iterator[str]:
    yield "## Links of the catalog"
    yield ""
    yield (
        "Bandwidth is what one device sends in one direction, latency that of one hop. Those with a fabric's name stand"
        " behind `@`; the others are inside a node."
    )
    yield ""
    yield "| name | link | GB/s | us | behind `@` | source |"
    yield "|---|---|---|---|---|---|"
    fabrics = catalog.fabric_names()
    for name in catalog.link_names():
        link = find_fabric(name) if name in fabrics else catalog.find_link(name)
        figures = f"{link.bandwidth / 1e9:g} | {link.latency_seconds * 1e6:g}"
        behind = "yes" if name in fabrics else "-"
        yield f"| `{name}` | {catalog.link_label(name)} | {figures} | {behind} | {link.source} |"
