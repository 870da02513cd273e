"""Which strategies are measured, on how many processes, and what their figures say. Values only; needs no torch."""

import os
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from allranks.config import resolve_config
from allranks.config_sections import LayoutConfig
from allranks.errors import ConfigError, LayoutError
from allranks.layout import Layout, num_processes
from allranks.layout_refusals import refuse_unsupported

STRATEGIES = (
    "single",
    "ddp",
    "ddp layout.ddp_hook=bfloat16",
    "ddp layout.ddp_hook=float16",
    "ddp layout.ddp_hook=powersgd layout.powersgd_start=2 layout.ddp_bucket_mb=64",
    "ddp layout.local_sgd=2",
    "dp_shard=*,sharding=optimizer",
    "fsdp",
    "fsdp,sharding=grad_op",
    "fsdp,sharding=none",
    "fsdp,recompute=full",
    "ddp,recompute=selective",
    "ddp,compile=block",
    "dp_replicate=2,dp_shard=2",
    "tp=*",
    "tp=2,dp_shard=2",
    "pp=*",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=interleaved",
    "pp=2,schedule=looped_bfs",
    "pp=2,schedule=interleaved_zb",
    "pp=2,schedule=zbv",
    "pp=2,schedule=dualpipev",
    "cp=*",
    "cp=* layout.context=ring",
    "ddp,ep=2",
)
NUM_PROCESSES = (2, 4)
DDP, FSDP = "ddp", "fsdp"
FSDP2 = "full", "grad_op"

TIME_TARGET = 1.03
MEMORY_TARGET = 1.02
FSDP_OF_DDP_TARGET = 1.25

MICRO_STEPS = 4
"""Of a step that goes through a pipeline."""

ONE_BUCKET_MB = 64
"""Of DDP: more than the gradients of the model take."""

LOSS_TOLERANCE = 1e-4
"""By how much of itself the loss of the first step may differ between the two sides."""

# How the one side is written by hand; what stands in none of them has no twin.
_TWINS: dict[str, tuple[object, ...]] = {
    "recompute": ("none", "selective", "full"),
    "offload": ("none",),
    "compile": ("none", "block"),
    "batchnorm": (None, "sync"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Attributes:
        strategy: as it was asked for.
        layout: what that means on `layout.world_size` processes.
    """

    strategy: str
    layout: Layout


@dataclass(frozen=True, slots=True)
class Measured:
    """What the processes of one case found.

    Attributes:
        turns: seconds a step of raw and of ours, one pair a turn, as rank 0 saw them.
        memory: bytes at the peak of a step, of raw and of ours, on the rank where they were most.
        losses: of the first step, of raw and of ours.
        beside_ddp: seconds a step of our ddp and of ours, one pair a turn, where the case is sharded over all.
    """

    turns: list[tuple[float, float]]
    memory: tuple[int, int]
    losses: tuple[float, float]
    beside_ddp: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        ratio, ratio_q1, ratio_q3: ours by raw: median and quartiles over the pairs; None (and every time 0) where the
            first losses differ, so that nothing was timed.
        raw_bytes, ours_bytes: at the peak of a step, on the process where it is most; 0 where the system does not tell.
        of_ddp: ours by our ddp on as many processes, the median over turns that both take; None where it is not sharded
            over all.
        loss_difference: of the first step, as a fraction.
        misses: the targets that are missed: "time", "memory", "of_ddp"; "loss" where the first losses differ.
    """

    strategy: str
    layout: str
    processes: int
    raw_ms: float
    ours_ms: float
    ratio: float | None
    ratio_q1: float
    ratio_q3: float
    raw_bytes: int
    ours_bytes: int
    memory_ratio: float | None
    of_ddp: float | None
    loss_difference: float
    turns: int
    misses: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As one JSON object."""
        return asdict(self)


def plan_cases(strategies: Sequence[str] | None, nproc: Sequence[int] | None) -> list[Case]:
    """The cases, fewest processes first.

    Args:
        strategies: layout strings, with keys `layout.KEY=VALUE` behind them, each of which has to fit one of `nproc` (a
            layout without `*` its own product); None: STRATEGIES, as far as they fit, and those with compile where the
            machine has a C++ compiler.
        nproc: numbers of processes; None: NUM_PROCESSES, and what a layout without `*` asks for.

    Raises:
        ConfigError: no such layout.
        LayoutError: it fits none of the numbers, or is nothing that torch has by hand.
    """
    found: dict[Layout, Case] = {}
    possible = [one for one in STRATEGIES if "compile" not in one or _can_compile()]
    for strategy in possible if strategies is None else strategies:
        cases, refusal = _fit(strategy, nproc)
        if not cases and strategies is not None:
            raise refusal or LayoutError(f"{strategy} fits none of {', '.join(map(str, nproc or NUM_PROCESSES))}")
        found.update((case.layout, case) for case in cases)
    return sorted(found.values(), key=lambda case: case.layout.world_size)


def _can_compile() -> bool:
    """Whether the compiler is there that torch compiles its kernels with."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _fit(strategy: str, nproc: Sequence[int] | None) -> tuple[list[Case], LayoutError | None]:
    config = read_strategy(strategy)
    refusal: LayoutError | None = None
    cases = []
    sizes = list(NUM_PROCESSES if nproc is None else nproc)
    own = None if _has_star(strategy) else num_processes(config, max(sizes))
    if own == 1 or (own is not None and nproc is None):
        sizes = [own]
    for size in sizes:
        try:
            layout = Layout.resolve(config, size)
            refuse_unsupported(layout)
            check_twin(layout)
        except LayoutError as error:
            refusal = refusal or error
            continue
        cases.append(Case(strategy, layout))
    return cases, refusal


def read_strategy(strategy: str) -> LayoutConfig:
    """`ddp layout.ddp_hook=bfloat16`: a layout, and keys that its string has not. Raises ConfigError."""
    layout, *keys = strategy.split()
    if wrong := next((key for key in keys if not key.startswith("layout.")), None):
        raise ConfigError(f"'{wrong}' behind the layout {layout}: expected keys of the layout, layout.KEY=VALUE")
    return resolve_config(task_defaults={}, toml=None, overrides=keys, layout=layout).layout


def _has_star(strategy: str) -> bool:
    config = read_strategy(strategy)
    return not config.chosen or "*" in (config.dp_replicate, config.dp_shard, config.tp, config.cp, config.pp)


def check_twin(layout: Layout) -> None:
    """Refuse a layout that nobody writes by hand in torch, or that this command has not written. Raises LayoutError."""
    for name, known in _TWINS.items():
        if (value := getattr(layout, name)) not in known:
            possible = " or ".join(str(word) for word in known if word)
            raise LayoutError(f"{name}={value} has no twin in raw torch here: it can be {possible}")
    plain = layout.recompute == layout.compile == "none"
    if layout.pp > 1 and not (_is_beside_data(layout, layout.pp) and plain and layout.ddp_hook == "none"):
        raise LayoutError(f"layout {layout}: a pipeline has a twin here alone, or beside dp_replicate or dp_shard")
    if layout.pp > 1 and not layout.fits_schedule(MICRO_STEPS):
        raise LayoutError(f"layout {layout}: the {MICRO_STEPS} micro-steps of this command do not fit its schedule")
    if layout.ddp_hook == "powersgd" and (layout.ddp_bucket_mb or 0) < ONE_BUCKET_MB:
        raise LayoutError(
            f"layout {layout}: torch's PowerSGD starts collectives from threads, out of order over gloo where there "
            f"are several buckets: its twin wants layout.ddp_bucket_mb={ONE_BUCKET_MB}, one for all"
        )
    if layout.local_sgd is not None and str(layout) != str(Layout(dp_replicate=layout.world_size)):
        raise LayoutError(f"layout {layout}: local_sgd has a twin here beside dp_replicate alone")
    if layout.cp > 1 and not (_is_beside_data(layout, layout.cp) and plain):
        raise LayoutError(f"layout {layout}: cp has a twin here alone, or beside dp_replicate or dp_shard")
    if layout.ep > 1 and not (_is_beside_data(layout, 1) and plain):
        raise LayoutError(f"layout {layout}: ep has a twin here beside dp_replicate, or dp_shard under FSDP2, alone")
    if layout.tp > 1 and layout.replicated:
        raise LayoutError(
            f"layout {layout}: torch's DDP takes no tensors cut over tp; add sharding=none, or a dp_shard"
        )


def _is_beside_data(layout: Layout, degree: int) -> bool:
    """Whether the axis of this degree stands alone, or beside one axis of whole copies or of FSDP2's shards."""
    data = max(layout.dp_replicate, layout.dp_shard)
    return degree == layout.world_size or (degree * data == layout.world_size and layout.sharding in FSDP2)


def read_numbers(text: str) -> tuple[int, ...]:
    """`2,4` -> (2, 4). Raises ConfigError."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--nproc {text}: expected numbers of processes such as 2 or 2,4")
    return numbers


def read_layouts(text: str) -> tuple[str, ...]:
    """`ddp; fsdp,sharding=grad_op` -> the two. Raises ConfigError for one that is no layout."""
    parts = tuple(part.strip() for part in text.split(";") if part.strip())
    if not parts:
        raise ConfigError(f"--layouts '{text}': expected layouts such as 'ddp;fsdp'")
    for part in parts:
        read_strategy(part)
    return parts


def summarise(found: Sequence[tuple[Case, Measured]]) -> list[Row]:
    """A row for each case, in their order."""
    return [_row(case, measured) for case, measured in found]


def is_beside_ddp(layout: Layout) -> bool:
    """Whether it is FSDP over all processes, which has a goal beside DDP."""
    return layout.dp > 1 and layout == Layout(dp_shard=layout.dp)


def _row(case: Case, measured: Measured) -> Row:
    ratios = [ours / raw for raw, ours in measured.turns]
    low, middle, high = statistics.quantiles(ratios, n=4) if ratios else (0.0, None, 0.0)
    raw_bytes, ours_bytes = measured.memory
    raw_ms, ours_ms = (_median_ms(measured, side) if ratios else 0.0 for side in (0, 1))
    memory_ratio = ours_bytes / raw_bytes if raw_bytes else None
    of_ddp = statistics.median(ours / ddp for ddp, ours in measured.beside_ddp) if measured.beside_ddp else None
    limits = (
        ("time", middle, TIME_TARGET),
        ("memory", memory_ratio, MEMORY_TARGET),
        ("of_ddp", of_ddp, FSDP_OF_DDP_TARGET),
        ("loss", loss_difference(measured), LOSS_TOLERANCE),
    )
    return Row(
        strategy=case.strategy,
        layout=str(case.layout),
        processes=case.layout.world_size,
        raw_ms=round(raw_ms, 3),
        ours_ms=round(ours_ms, 3),
        ratio=None if middle is None else round(middle, 4),
        ratio_q1=round(low, 4),
        ratio_q3=round(high, 4),
        raw_bytes=raw_bytes,
        ours_bytes=ours_bytes,
        memory_ratio=None if memory_ratio is None else round(memory_ratio, 4),
        of_ddp=None if of_ddp is None else round(of_ddp, 4),
        loss_difference=loss_difference(measured),
        turns=len(measured.turns),
        misses=tuple(name for name, value, limit in limits if value is not None and value > limit),
    )


def loss_difference(measured: Measured) -> float:
    """Between the first losses of the two sides, as a fraction of raw's."""
    raw, ours = measured.losses
    return abs(ours - raw) / abs(raw)


def _median_ms(measured: Measured, side: int) -> float:
    return statistics.median(pair[side] for pair in measured.turns) * 1e3
