"""How many processes this machine starts where nobody says so."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout, num_processes, render_layout
from allranks.layout_string import parse_layout
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.training.prepare import Prepared
from allranks.verdict import Decision

CPU_PROCESSES = 2


def choose_processes(prepared: Prepared, request: TrainRequest, nodes: int = 1) -> tuple[int, Decision]:
    """How many processes this machine starts, with because."""
    if request.nproc is not None:
        return request.nproc, Decision(_count(request.nproc), "--nproc says so")
    config = prepared.config
    gpus = torch.cuda.device_count() if request.device != "cpu" else 0
    before = 0 if prepared.kept is None else last_world_size(prepared.kept)
    if before and (not gpus or before <= gpus):
        available, because = before, "that is how many it had before" + _tell_damage(prepared.kept)
    elif gpus:
        available, because = gpus, f"this machine has {gpus} GPU(s)" + _tell_damage(prepared.kept)
    else:
        because = "there is no GPU, and two processes show what more would do" + _tell_damage(prepared.kept)
        available = CPU_PROCESSES
    chosen = num_processes(config.layout, available, nodes)
    if chosen != available:
        because = f"the layout {render_layout(config.layout)} asks for it"
    elif prepared.unnamed and Layout.resolve(config.layout, chosen, nodes).dp > config.train.global_batch:
        chosen = fewer_for_batch(prepared, chosen, nodes)
        because = f"train.global_batch={config.train.global_batch} gives no more than that a sample"
    return chosen, Decision(_count(chosen), because)


def fewer_for_batch(prepared: Prepared, processes: int, nodes: int = 1) -> int:
    """Of so many processes those that are started where nobody names a layout: no more than a step has samples.

    The plan of a run's first start was made for these, so that its later ones, and hosts that come later, count alike.

    Args:
        nodes: which all start as many.
    """
    most = prepared.config.train.global_batch // nodes * nodes
    if not prepared.unnamed or not 0 < most < processes:
        return processes
    with contextlib.suppress(LayoutError):  # it was planned for more, which somebody named (--nproc)
        fewer = num_processes(prepared.config.layout, most, nodes)
        return processes if fewer % nodes else fewer
    return processes


def last_world_size(run: Run) -> int:
    """The processes of the run's last attempt, or 0 where it had none; damaged starts are left out."""
    starts = [event for event in run.events(0) if event["event"] == "start"]
    return next((event["world_size"] for event in reversed(starts) if _is_sound(event)), 0)


def _tell_damage(run: Run | None) -> str:
    """Which starts `last_world_size` left out; "" where there is nothing to say."""
    if run is None:
        return ""
    damaged = sum(event["event"] == "start" and not _is_sound(event) for event in run.events(0))
    return f" ({damaged} damaged start event(s) in {run.journal(0)} left out)" if damaged else ""


def _is_sound(start: Mapping[str, Any]) -> bool:
    """Whether it tells a number of processes, and the one that its layout has."""
    size, layout = start.get("world_size"), start.get("layout")
    if type(size) is not int or size < 1:
        return False
    try:
        return not isinstance(layout, str) or num_processes(parse_layout(layout), size) == size
    except (ConfigError, LayoutError):
        return False


def _count(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
