"""A cluster string or a cluster file into a Cluster; what was assumed on the way is in its notes."""

import os
import re
from pathlib import Path

from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.planning.assembly import build_cluster, check_count, find_fabric
from allranks.planning.catalog import find_device, tidy
from allranks.planning.cluster_file import read_cluster
from allranks.planning.this_machine import cpu_cluster, local_cluster

FORM = "[NODESx]DEVICES:DEVICE[@FABRIC], e.g. 8x8:a100-80g@hdr200"
_STRING = re.compile(
    r"(?:(?P<nodes>\d{1,12})\s*x\s*)?(?P<devices>\d{1,12})\s*:\s*(?P<device>[^@:]+?)(?:@(?P<fabric>[^@]*))?",
    re.IGNORECASE,
)


def find_cluster(text: str) -> Cluster:
    """The Cluster that `--cluster` names.

    Args:
        text: `4:h100`, `8x8:a100-80g@hdr200`, `8x8:h100@400g` (Gbit/s a device), `1x2:cpu`, `local`, or the path of a
            TOML file.

    Raises:
        ConfigError: one line: what is wrong, and the nearest that is right.
    """
    text = text.strip()
    if text.lower() == "local":
        return local_cluster()
    if text.lower().endswith(".toml") or os.path.isfile(text):  # pathlib's raises where a name is too long
        return read_cluster(Path(text))
    return _from_string(text)


def _from_string(text: str) -> Cluster:
    match = _STRING.fullmatch(text)
    if match is None:
        raise ConfigError(f"cluster '{text}': {_explain(text)}")
    nodes, devices = int(match["nodes"] or 1), int(match["devices"])
    fabric = match["fabric"]
    if fabric is not None and not fabric.strip():
        raise ConfigError(f"cluster '{text}': no fabric behind '@'; e.g. @hdr200, or @400g for 400 Gbit/s a device")
    try:
        check_count(nodes, devices)
        if tidy(match["device"]) == "cpu":
            return cpu_cluster(nodes, devices, None if fabric is None else find_fabric(fabric), name=text)
        return build_cluster(text, nodes, devices, find_device(match["device"]), fabric)
    except ConfigError as error:
        raise ConfigError(f"cluster '{text}': {error}") from None


def _explain(text: str) -> str:
    if not text:
        return f"empty; the form is {FORM}"
    if re.fullmatch(r"-\d.*|.*[x:]-\d.*", text):
        return f"a number of nodes or devices is negative; the form is {FORM}"
    if re.fullmatch(r"\d+(x\d+)?:?", text):
        return f"no device; the form is {FORM}"
    if "/" in text or "\\" in text:
        return "no such file, and no cluster string; a cluster file ends in .toml"
    word = re.split(r"[@:]", text)[0]
    try:
        device = tidy(word) if tidy(word) == "cpu" else find_device(word).device.name
    except ConfigError:
        return f"not understood; the form is {FORM}, or local, or a TOML file"
    return f"how many? One node of eight is 8:{device}; the form is {FORM}"
