"""Layout: how a step is spread over the processes, every degree a number.

A LayoutConfig is what the user wrote (it may say "what is left"); a Layout is what that means in a known world.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, final

from allranks.config_sections import AXES, PROCESS_AXES, LayoutConfig
from allranks.errors import LayoutError
from allranks.layout_placement import devices_named
from allranks.layout_string import MODES, parse_layout, render_layout

__all__ = ["AXES", "PROCESS_AXES", "Layout", "num_processes", "parse_layout", "render_layout"]

Sharding = Literal["full", "grad_op", "none", "optimizer"]
Kind = Literal["single", "mesh", "data_parallel", "placement"]

ONE_STAGE_EACH = ("1f1b", "gpipe")
THERE_AND_BACK = ("zbv", "dualpipev")


@final
@dataclass(frozen=True, slots=True)
class Layout:
    """The degrees and modes of one run.

    Attributes:
        dp_replicate: copies of the model.
        dp_shard: processes that share one copy's parameters.
        tp, cp, pp: processes that share each layer, each sequence; stages of the pipeline.
        ep: processes that share the experts; no factor of the world, it divides dp.
        sharding: what dp_shard shares. "none": `fully_shard` with dp_shard 1, all ranks in dp_replicate. Says nothing
            where there is nothing to share (see `fully_sharded`).
        context: how the ranks of a sequence attend to each other's positions.
        schedule, recompute, offload, batchnorm, compile, static_graph, gather, prefetch, ddp_bucket_mb: as in the
            config.
        ddp_hook, powersgd_*, local_sgd, outer_*: as in the config, too.
        kind: "single" is one process on one device; "data_parallel" is one process on several, and under "placement"
            each copy of the model is one.
        placement: (glob of module or parameter names, device) in the user's order; () is balanced by bytes.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    sharding: Sharding = "full"
    schedule: str = "1f1b"
    recompute: str = "none"
    offload: str = "none"
    batchnorm: Literal["sync", "local", "broadcast"] | None = None
    compile: str = "none"
    static_graph: bool = False
    gather: Literal["float32", "bfloat16"] | None = None
    prefetch: int | None = None
    ddp_bucket_mb: float | None = None
    context: Literal["ulysses", "ring"] = "ulysses"
    ddp_hook: Literal["none", "bfloat16", "float16", "powersgd"] = "none"
    powersgd_rank: int = 4
    powersgd_start: int = 1000
    local_sgd: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_nesterov: bool = True
    kind: Kind = "mesh"
    placement: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def resolve(config: LayoutConfig, world_size: int, num_nodes: int = 1) -> "Layout":
        """The Layout that `config` means in a world of `world_size` processes on `num_nodes` nodes.

        A config that names no layout is `ddp`. Raises LayoutError with the equation and a layout that fits.
        """
        modes: dict[str, Any] = {name: getattr(config, name) for name in _KEPT_AS_GIVEN}
        if config.kind == "data_parallel":
            if world_size != 1:
                raise LayoutError(
                    f"{config.kind} is one process on several devices, but the world has {world_size} processes"
                )
            return Layout(**modes, kind=config.kind)
        degrees = _fill(_written(config, num_nodes), world_size, "placement," if config.placed else "")
        dp = degrees["dp_replicate"] * degrees["dp_shard"]
        if dp % degrees["ep"]:
            fits = ", ".join(str(n) for n in range(1, dp + 1) if dp % n == 0)
            left = f"dp_replicate({degrees['dp_replicate']}) * dp_shard({degrees['dp_shard']}) = {dp}"
            raise LayoutError(f"ep({degrees['ep']}) does not divide {left}; ep can be {fits}")
        _check_sharding(config, degrees, world_size)
        if config.sharding == "none":
            degrees |= {"dp_replicate": dp, "dp_shard": 1}
        kind: Kind = "placement" if config.placed else "single" if world_size == 1 else "mesh"
        modes["placement"] = tuple((config.placement or {}).items())
        return replace(Layout(**modes, kind=kind, sharding=config.sharding or "full"), **degrees)

    @property
    def world_size(self) -> int:
        """Processes in the world."""
        return math.prod(getattr(self, axis) for axis in PROCESS_AXES)

    @property
    def dp(self) -> int:
        """Data-parallel ranks: the D of the laws, over which a step's samples are cut."""
        return self.dp_replicate * self.dp_shard

    @property
    def sample_ranks(self) -> int:
        """Ranks that see other samples, or other positions of them."""
        return self.dp * self.cp

    @property
    def copies(self) -> int:
        """Copies of the model whose gradients are averaged: between two steps of local_sgd each is by itself."""
        return self.dp_replicate if self.local_sgd is None else 1

    @property
    def gradient_ranks(self) -> int:
        """Ranks over which a gradient is summed."""
        return self.copies * self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks of one copy that hold the same experts and share their parameters out; 1: each has them whole.

        Where ep and dp_shard do not fit into each other, unequally many of a copy hold the same ones.
        """
        smaller, larger = sorted((self.ep, self.dp_shard))
        if self.ep == 1 or self.dp_shard == 1 or not self.fully_sharded or larger % smaller:
            return 1
        return max(1, self.dp_shard // self.ep) * self.cp

    @property
    def fully_sharded(self) -> bool:
        """Whether parameters go through `fully_shard`: dp_shard above 1, or sharding "none" in a world above 1."""
        return self.sharding != "optimizer" and (self.dp_shard > 1 or (self.sharding == "none" and self.dp > 1))

    @property
    def replicated(self) -> bool:
        """Whether copies of the model are kept equal by DDP."""
        return self.gradient_ranks > 1 and not self.fully_sharded

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; some schedules give each process two of them."""
        return self.pp * (1 if self.pp == 1 or self.schedule in ONE_STAGE_EACH else 2)

    def stage_rank(self, stage: int) -> int:
        """The pp coordinate of the process that runs a stage: around in a loop, or there and back (V)."""
        there_and_back = self.schedule in THERE_AND_BACK and stage >= self.pp
        return 2 * self.pp - 1 - stage if there_and_back else stage % self.pp

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """`stage_rank` of every stage."""
        return tuple(self.stage_rank(stage) for stage in range(self.num_stages))

    def fits_schedule(self, micro_steps: int) -> bool:
        """Whether the schedule takes so many micro-steps: one a stage at least, and only whole rounds."""
        in_rounds = self.num_stages > self.pp
        return micro_steps >= self.num_stages and (not in_rounds or micro_steps % self.pp == 0)

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters wait in the host's memory."""
        return self.offload in ("parameters", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether what blocks keep for the backward does."""
        return self.offload in ("activations", "all")

    @property
    def cuts_model(self) -> bool:
        """Whether no process computes the whole model by itself: layers are shared out, or what is in a layer."""
        return max(self.tp, self.cp, self.pp, self.ep) > 1

    def __str__(self) -> str:
        """The canonical layout string, which `parse_layout` reads back."""
        if self.kind == "data_parallel":
            return self.kind
        degrees = ["placement"] if self.kind == "placement" else []
        degrees += [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        modes = [f"{name}={value}" for name, value in self.differing() if name in MODES]
        return ",".join((degrees or ["single"]) + modes)

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{name}={value!r}' for name, value in self.differing())})"

    def differing(self) -> Iterator[tuple[str, object]]:
        """(name, value) of what is not as by default."""
        for part in fields(self):
            value = getattr(self, part.name)
            if value != part.default and value != "single":
                yield part.name, value


_KEPT_AS_GIVEN = (
    *("schedule", "recompute", "offload", "batchnorm", "compile", "static_graph", "gather", "prefetch"),
    *("ddp_bucket_mb", "context", "ddp_hook", "powersgd_rank", "powersgd_start"),
    *("local_sgd", "outer_lr", "outer_momentum", "outer_nesterov"),
)


def num_processes(config: LayoutConfig, available: int, num_nodes: int = 1) -> int:
    """Processes that `config` starts where `available` can run: the product, or with a `*` its largest multiple.

    Raises LayoutError where the degrees beside the `*` need more than there are.
    """
    if config.kind == "data_parallel":
        return 1
    if config.placement:
        available = max(1, available // devices_named(config.placement))
    written = _written(config, num_nodes)
    fixed = _product_of_numbers(written)
    if "*" not in written.values():
        return fixed
    if fixed > available:
        raise LayoutError(f"{_equation(written)} = {fixed} * n, but only {_count(available, 'process')} can run here")
    return available // fixed * fixed


def _written(config: LayoutConfig, num_nodes: int) -> dict[str, int | str]:
    """Axis -> degree or "*"; a config that names none is ddp."""
    if config.kind == "placement" and config.dp_replicate is None:
        return dict.fromkeys(AXES, 1)
    if not config.chosen:
        return {axis: "*" if axis == "dp_replicate" else 1 for axis in AXES}
    degrees = {axis: getattr(config, axis) for axis in AXES}
    return {axis: num_nodes if degree == "nodes" else degree for axis, degree in degrees.items()}


def _fill(written: Mapping[str, int | str], world_size: int, prefix: str = "") -> dict[str, Any]:
    """Put what is left in place of the `*`, or raise the equation; `prefix` of the layout that fits."""
    fixed = _product_of_numbers(written)
    starred = "*" in written.values()
    fits = world_size % fixed == 0 if starred else world_size == fixed
    if not fits:
        right = f"{fixed} * n" if starred else str(fixed)
        proposal = f"{prefix}{_propose(written, world_size)} fits"
        raise LayoutError(
            f"{_equation(written)} = {right}, but the world has {_count(world_size, 'process')}; {proposal}"
        )
    return {axis: world_size // fixed if degree == "*" else int(degree) for axis, degree in written.items()}


def _propose(written: Mapping[str, int | str], world_size: int) -> str:
    """The nearest layout that fits: one degree changed where that is enough, else each cut to what divides the rest."""
    degrees = {axis: 1 if degree == "*" else int(degree) for axis, degree in written.items()}
    free = next((axis for axis in PROCESS_AXES if written[axis] == "*"), None)
    order = ["dp_shard", "dp_replicate"] if degrees["dp_shard"] > 1 else ["dp_replicate", "dp_shard"]
    for axis in [*order, "pp", "cp", "tp"] if free is None else []:
        others = math.prod(degrees[other] for other in PROCESS_AXES if other != axis)
        if world_size % others == 0:
            return _render({**degrees, axis: world_size // others})
    left, last = world_size, free or order[0]
    for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate"):
        if axis != last:
            degrees[axis] = max(n for n in range(1, min(degrees[axis], left) + 1) if left % n == 0)
            left //= degrees[axis]
    return _render({**degrees, last: left})


def _render(degrees: Mapping[str, int]) -> str:
    """A layout string in which ep divides the data-parallel ranks."""
    ep = math.gcd(degrees["ep"], degrees["dp_replicate"] * degrees["dp_shard"])
    return render_layout(LayoutConfig.model_validate({**degrees, "ep": ep}))


def _check_sharding(config: LayoutConfig, degrees: Mapping[str, int], world_size: int) -> None:
    """A sharding that the user named needs ranks that share; `dp_shard=*` in a world of one is no mistake."""
    if config.sharding in (None, "none") or degrees["dp_shard"] > 1 or config.dp_shard == "*" or world_size == 1:
        return
    written = f"sharding={config.sharding}"
    fits = render_layout(config.model_copy(update={"dp_replicate": 1, "dp_shard": degrees["dp_replicate"]}))
    advice = fits if degrees["dp_replicate"] > 1 else "a dp_shard above 1"
    raise LayoutError(f"{written} shares over dp_shard, but dp_shard(1): there is nobody to share with; {advice} fits")


def _product_of_numbers(written: Mapping[str, int | str]) -> int:
    return math.prod(int(written[axis]) for axis in PROCESS_AXES if written[axis] != "*")


def _equation(written: Mapping[str, int | str]) -> str:
    return " * ".join(f"{axis}({written[axis]})" for axis in PROCESS_AXES)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es'}"
