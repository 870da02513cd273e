"""What-if: one change to a configuration, and what it does to memory and speed."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final, get_args

from allranks.cluster import Cluster
from allranks.config_keys import did_you_mean
from allranks.config_sections import PROCESS_AXES, LayoutConfig, TrainConfig
from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout
from allranks.model_profile import Block, ModelProfile
from allranks.plan import Choice, Estimate, Refusal, WhatIf
from allranks.planning.amounts import MOST_SAMPLES, POSITIONS, read_number
from allranks.planning.estimate import estimate
from allranks.planning.question import Question
from allranks.planning.reasons import difference
from allranks.planning.rules import check
from allranks.planning.scale import cluster_of
from allranks.planning.setting import setting_of
from allranks.units import format_bytes

MODES = ("recompute", "sharding", "offload", "schedule", "compile", "context", "gather", "ddp_hook")
SIZES = ("micro_batch", "global_batch", "seq", "gpus", "unit", *PROCESS_AXES, "ep")
KEYS = (*MODES, "precision", *SIZES)


@final
@dataclass(frozen=True, slots=True)
class Situation:
    """A model, a cluster and a choice: what a change is made to."""

    profile: ModelProfile
    cluster: Cluster
    choice: Choice


def usual_changes(first: Estimate, question: Question) -> list[str]:
    """The changes that people ask about, as far as they change anything."""
    choice, layout = first.choice, first.choice.layout
    found = [f"recompute={mode}" for mode in ("none", "selective", "full") if mode != layout.recompute]
    if layout.dp_shard > 1:
        found += [f"sharding={mode}" for mode in ("full", "grad_op", "optimizer") if mode != layout.sharding]
    found += [f"offload={mode}" for mode in ("none", "activations", "parameters") if mode != layout.offload]
    if question.fixed_micro_steps(question.make_profile(question.seq, choice.precision)) is None:
        larger = choice.micro_batch * 2 if setting_of(choice).micro_steps > 1 else 0
        found += [f"micro_batch={size}" for size in (choice.micro_batch // 2, larger) if size]
    if choice.precision != "float32":
        found.append("precision=float32")
    total = question.cluster.num_devices
    found += [f"gpus={number}" for number in (total // 2, total * 2) if number]
    return found


def what_if(change: str, first: Estimate, question: Question) -> WhatIf:
    """What `change` (`KEY=VALUE`) alone does to `first`. Raises ConfigError where it is no change that there is.

    One that there is and that this model or cluster cannot take is refused in its row.
    """
    key, value = _read(change)
    here = Situation(question.make_profile(question.seq, first.choice.precision), question.cluster, first.choice)
    try:
        there = _change(key, value, here, question)
        refusal = check(there.profile, there.cluster, there.choice)
    except (LayoutError, ConfigError) as error:
        because = str(error).removeprefix(f"--gpus {value}: ").removeprefix(f"{change}: ")
        refusal = Refusal("layout", change, because)
    if refusal is not None:
        return WhatIf(change, None, f"refused: {refusal.because}{_would_save(key, value, first)}")
    found = estimate(there.profile, there.cluster, there.choice)
    return WhatIf(change, found, difference(found, first))


def _read(change: str) -> tuple[str, Any]:
    key, equals, value = (part.strip() for part in change.partition("="))
    if not equals or not value:
        raise ConfigError(f"what-if '{change}': write KEY=VALUE, e.g. recompute=full")
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, 1)
        advice = f"did you mean {near[0]}?" if near else f"it can be {', '.join(KEYS)}"
        raise ConfigError(f"what-if '{change}': no change is called '{key}'; {advice}")
    if key not in SIZES:
        _check_mode(change, key, value)
        return key, value
    if key == "seq":
        positions = int(read_number(value, POSITIONS, f"what-if '{change}': seq"))
        if positions < 1:
            raise ConfigError(f"what-if '{change}': seq takes at least 1 position")
        return key, positions
    if not (value.isascii() and value.isdigit() and value.strip("0")):
        raise ConfigError(f"what-if '{change}': {key} takes a whole number of at least 1")
    if float(value) > MOST_SAMPLES:  # of thousands of digits int() makes none
        raise ConfigError(f"what-if '{key}=...': more than {MOST_SAMPLES:g}, which no run has")
    return key, int(value)


def _check_mode(change: str, key: str, value: str) -> None:
    """The values that `--layout` and train.precision take."""
    section: Any = TrainConfig if key == "precision" else LayoutConfig
    kinds = [get_args(kind) or (kind,) for kind in get_args(section.model_fields[key].annotation)]
    names = [name for kind in kinds for name in kind if isinstance(name, str)]
    if value not in names:
        advice = did_you_mean(difflib.get_close_matches(value, names, 1)) or f"; it can be {', '.join(names)}"
        raise ConfigError(f"what-if '{change}': no {key} is called '{value}'{advice}")


def _change(key: str, value: Any, here: Situation, question: Question) -> Situation:
    changers: dict[str, Callable[[], Situation]] = {
        "precision": lambda: replace(
            here, profile=question.make_profile(question.seq, value), choice=replace(here.choice, precision=value)
        ),
        "micro_batch": lambda: _in_forwards_of(value, here),
        "global_batch": lambda: replace(here, choice=replace(here.choice, global_batch=value)),
        "seq": lambda: replace(here, profile=question.make_profile(value, here.choice.precision)),
        "gpus": lambda: _on_gpus(value, here),
        "unit": lambda: replace(here, profile=in_units(here.profile, value)),
    }
    if key in changers:
        return changers[key]()
    layout = here.choice.layout
    changed = _on_axis(layout, key, value) if key in SIZES else replace(layout, **{key: value})
    if key == "recompute" and value == "budget":
        changed = replace(changed, compile="block")
    return replace(here, choice=_with_layout(here.choice, changed))


def _in_forwards_of(samples: int, here: Situation) -> Situation:
    """So many samples in each forward, of which a rank has as many in a step."""
    choice = here.choice
    share = -(-choice.global_batch // choice.layout.dp)
    if samples > share:
        raise ConfigError(f"a data-parallel rank has {share} of the {choice.global_batch} samples of a step")
    return replace(here, choice=replace(choice, micro_batch=samples))


def _with_layout(choice: Choice, layout: Layout) -> Choice:
    layout = replace(layout, kind="single" if layout.world_size == 1 else "mesh")
    return replace(choice, layout=layout, chunks=layout.num_stages // layout.pp)


def _on_gpus(number: int, here: Situation) -> Situation:
    """The same degrees on another number of devices: more or fewer data-parallel ranks."""
    layout = here.choice.layout
    inside = layout.tp * layout.cp * layout.pp
    return Situation(
        here.profile,
        cluster_of(here.cluster, number),
        _with_layout(here.choice, _with_data(layout, number, inside, f"gpus={number}")),
    )


def _on_axis(layout: Layout, axis: str, degree: int) -> Layout:
    """Another degree of one axis in the same world: the data-parallel ranks take what is left."""
    if axis == "ep":
        return replace(layout, ep=degree)
    total = layout.world_size
    if axis in ("dp_replicate", "dp_shard"):
        other = "dp_shard" if axis == "dp_replicate" else "dp_replicate"
        if layout.dp % degree:
            raise LayoutError(f"{axis}={degree} does not divide the {layout.dp} data-parallel ranks")
        degrees: dict[str, Any] = {axis: degree, other: layout.dp // degree}
        return replace(layout, **degrees)
    changes: dict[str, Any] = {axis: degree}
    changed = replace(layout, **changes)
    return _with_data(changed, total, changed.tp * changed.cp * changed.pp, f"{axis}={degree}")


def _with_data(layout: Layout, total: int, inside: int, change: str) -> Layout:
    """The layout whose data-parallel ranks fill `total`; shared as before, as far as that divides."""
    ranks, left = divmod(total, inside)
    if left or not ranks:
        raise LayoutError(f"{change}: tp * cp * pp = {inside} does not divide {total} devices")
    if layout.dp_replicate == 1:
        return replace(layout, dp_shard=ranks) if layout.dp_shard > 1 else replace(layout, dp_replicate=ranks)
    shard = layout.dp_shard if ranks % layout.dp_shard == 0 else 1
    return replace(layout, dp_replicate=ranks // shard, dp_shard=shard)


def in_units(profile: ModelProfile, number: int) -> ModelProfile:
    """The profile with `number` repeated blocks in each unit that is gathered, recomputed and cut off as one."""
    return replace(profile, blocks=tuple(_merged(block, number) for block in profile.blocks))


def _merged(block: Block, number: int) -> Block:
    if not block.repeated or number == 1:
        return block
    if block.count % number:
        raise LayoutError(f"units of {number} blocks do not divide {block.count} of {block.name}")
    return replace(block, operations=block.operations * number, count=block.count // number)


def _would_save(key: str, value: Any, first: Estimate) -> str:
    """What the memory tables say that a refused move to the host would be about."""
    if key != "offload" or value not in ("parameters", "all"):
        return ""
    size = first.memory.weights + first.memory.optimizer
    return f" (weights and the optimizer's state are {format_bytes(size)})"
