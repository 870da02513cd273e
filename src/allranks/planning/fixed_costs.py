"""What a step takes on a processor besides kernels and bytes, from small programs that differ in one thing each.

Two programs that differ in their depth, say, differ by what so many blocks take. What the estimate does not explain of
that difference, over how much of it one unit of a figure would explain, is the figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from allranks.cluster import Cluster, FixedSeconds
from allranks.layout import Layout
from allranks.layout_string import parse_layout
from allranks.model_profile import ModelProfile
from allranks.plan import Choice
from allranks.planning.estimate import estimate

MICRO_BATCH = 4
DEEPER, MORE, TWICE = 3, 4, 2
"""How often the blocks of the shallow program the deep one has, and the forwards of the short one the long one; and
how many forwards for each process where two schedules are compared."""
MOST_STAGES = 8
"""Processes up to which layers are cut and staged over all of them: a chain for more would take minutes."""
UNIT_SECONDS = 1e-4
DIGITS = 6


@final
@dataclass(frozen=True, slots=True)
class Program:
    """One small program: a chain of `depth` equal blocks that makes `micro_steps` forwards a step under `layout`."""

    layout: str
    depth: int
    micro_steps: int

    def choice(self, num_processes: int) -> Choice:
        """What it is to the planner."""
        layout = Layout.resolve(parse_layout(self.layout), num_processes)
        batch, chunks = MICRO_BATCH * layout.dp * self.micro_steps, layout.num_stages // layout.pp
        return Choice(layout, batch, MICRO_BATCH, "float32", chunks)


def pairs(num_processes: int) -> dict[str, tuple[Program, Program | None]]:
    """Of each figure of FixedSeconds, in the order in which they are solved: the programs whose difference gives it."""
    shallow = max(2, num_processes) if num_processes <= MOST_STAGES else 2
    deep, copies = DEEPER * shallow, "ddp" if num_processes > 1 else "single"
    short = Program(copies, shallow, 1)
    found: dict[str, tuple[Program, Program | None]] = {
        "operation": (Program(copies, deep, 1), short),
        "micro_step": (Program(copies, shallow, MORE), short),
        "step": (short, None),
    }
    if num_processes > 1:
        found["unit_message"] = (Program("fsdp", deep, 1), Program("fsdp", shallow, 1))
    if 1 < num_processes <= MOST_STAGES:
        cut, staged, few = f"tp={num_processes}", f"pp={num_processes}", num_processes
        found["move"] = (Program(cut, deep, 1), Program(cut, shallow, 1))
        found["hop"] = (Program(staged, shallow, MORE * few), Program(staged, shallow, few))
        parted, whole = (f"{staged},schedule={name}" for name in ("interleaved_zb", "interleaved"))
        found["parting"] = (Program(parted, deep, TWICE * few), Program(whole, deep, TWICE * few))
    return found


def programs(num_processes: int) -> list[Program]:
    """All of them, each once."""
    every = (program for pair in pairs(num_processes).values() for program in pair if program is not None)
    return list(dict.fromkeys(every))


def solve(cluster: Cluster, profiles: Mapping[int, ModelProfile], seconds: Mapping[Program, float]) -> FixedSeconds:
    """The figures, one after the other; 0 where the estimate explains all, or where a program was not measured.

    Args:
        cluster: with every other figure as measured.
        profiles: of the chain, by its depth.
        seconds: of a step, on the slowest process.
    """
    fixed = FixedSeconds()

    def calculated(program: Program | None, tried: FixedSeconds) -> float:
        if program is None:
            return 0.0
        there = replace(cluster, device=replace(cluster.device, fixed=tried))
        return estimate(profiles[program.depth], there, program.choice(cluster.num_devices)).time.total

    for name, (much, little) in pairs(cluster.num_devices).items():
        if much not in seconds or (little is not None and little not in seconds):
            continue
        took = seconds[much] - (0.0 if little is None else seconds[little])
        more = replace(fixed, **{name: UNIT_SECONDS})
        explained = calculated(much, fixed) - calculated(little, fixed)
        by_unit = calculated(much, more) - calculated(little, more) - explained
        if by_unit > 0:
            found = max(0.0, (took - explained) / by_unit * UNIT_SECONDS)
            fixed = replace(fixed, **{name: float(f"{found:.{DIGITS}g}")})
    return fixed
