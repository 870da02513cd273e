"""The layouts of law 4's matrix, and which of its cells are refused."""

from functools import cache
from typing import NamedTuple

from allranks.layout import Layout
from tests.distributed.sessions import config_of


class Row(NamedTuple):
    """A layout in a world of processes."""

    name: str
    layout: str
    context: str
    world_size: int
    keys: tuple[str, ...] = ()  # what has no place in a layout string

    def __str__(self) -> str:
        return f"{self.name}x{self.world_size}"

    @property
    def overrides(self) -> tuple[str, ...]:
        return (f"layout.context={self.context}", *self.keys)

    @property
    def resolved(self) -> Layout:
        return _resolve(self)


@cache
def _resolve(row: Row) -> Layout:
    return Layout.resolve(config_of(row.layout, *row.overrides).layout, row.world_size)


def _rows(layouts: dict[str, tuple[str, tuple[int, ...]]], context: str = "ulysses") -> list[Row]:
    return [Row(name, layout, context, size) for name, (layout, sizes) in layouts.items() for size in sizes]


DATA = _rows(
    {
        "single": ("single", (1,)),
        "data_parallel": ("data_parallel", (1,)),
        "placement": ("placement", (1,)),
        "placement-ddp": ("placement,dp_replicate=2", (2,)),
        "ddp": ("ddp", (2, 3, 4)),
        "fsdp": ("fsdp", (2, 3, 4)),
        "grad_op": ("fsdp,sharding=grad_op", (2, 3, 4)),
        "none": ("fsdp,sharding=none", (2, 3, 4)),
        "optimizer": ("dp_shard=*,sharding=optimizer", (2, 3, 4)),
        "hsdp": ("dp_replicate=2,dp_shard=2", (4,)),
        "hybrid-grad_op": ("dp_replicate=2,dp_shard=2,sharding=grad_op", (4,)),
        "recompute": ("ddp,recompute=full", (2,)),
        "selective": ("fsdp,recompute=selective", (2,)),
    }
)
TENSOR_PARALLEL = _rows(
    {
        "tp": ("tp=*", (2, 3, 4)),
        "tp-ddp": ("tp=2,dp_replicate=2", (4,)),
        "tp-fsdp": ("tp=2,dp_shard=2,recompute=full", (4,)),
        "tp-optimizer": ("tp=2,dp_shard=2,sharding=optimizer", (4,)),
    }
)
CONTEXT = [
    *_rows(
        {
            "cp": ("cp=*", (2, 3, 4)),
            "cp-ddp": ("cp=2,dp_replicate=2,recompute=selective", (4,)),
            "cp-grad_op": ("cp=2,dp_shard=2,sharding=grad_op", (4,)),
            "cp-optimizer": ("cp=2,dp_shard=2,sharding=optimizer", (4,)),
            "cp-tp": ("cp=2,tp=2", (4,)),
        }
    ),
    *_rows(
        {
            "ring": ("cp=*", (2, 3, 4)),
            "ring-none": ("cp=2,dp_replicate=2,sharding=none", (4,)),
            "ring-fsdp": ("cp=2,dp_shard=2,recompute=full", (4,)),
            "ring-tp": ("cp=2,tp=2,recompute=selective", (4,)),
        },
        "ring",
    ),
]
EXPERTS = [
    *_rows(
        {
            "ep-ddp": ("dp_replicate=*,ep=2", (2, 4)),
            "ep-fsdp": ("dp_shard=*,ep=2", (2, 4)),
            "ep-grad_op": ("dp_shard=2,ep=2,sharding=grad_op", (2,)),
            "ep-none": ("dp_replicate=2,ep=2,sharding=none", (2,)),
            "ep-optimizer": ("dp_shard=*,ep=2,sharding=optimizer,recompute=full", (2, 4)),
            "ep-hsdp": ("dp_replicate=2,dp_shard=2,ep=2", (4,)),
            "ep-tp": ("dp_replicate=2,tp=2,ep=2", (4,)),
            "ep-cp": ("dp_shard=2,cp=2,ep=2", (4,)),
            "all-to-all": ("dp_replicate=4,ep=4", (4,)),
        }
    ),
    *_rows({"ep-ring": ("dp_shard=2,cp=2,ep=2", (4,))}, "ring"),
]
PIPELINES = [
    *_rows(
        {
            "1f1b": ("pp=*", (2, 3, 4)),
            "pp-recompute": ("pp=2,recompute=full", (2,)),
            "pp-ddp": ("pp=2,dp_replicate=2", (4,)),
            "pp-fsdp": ("pp=2,dp_shard=2", (4,)),
            "pp-grad_op": ("pp=2,dp_shard=2,sharding=grad_op", (4,)),
            "pp-none": ("pp=2,dp_shard=2,sharding=none", (4,)),
            "pp-optimizer": ("pp=2,dp_shard=2,sharding=optimizer", (4,)),
            "pp-tp": ("pp=2,tp=2", (4,)),
            "pp-cp": ("pp=2,cp=2", (4,)),
            "pp-ep": ("pp=2,dp_replicate=2,ep=2", (4,)),
            "pp-ep-fsdp": ("pp=2,dp_shard=2,ep=2", (4,)),
            "interleaved-ddp": ("pp=2,dp_replicate=2,schedule=interleaved", (4,)),
            "interleaved-fsdp": ("pp=2,dp_shard=2,schedule=interleaved", (4,)),
            "interleaved-tp": ("pp=2,tp=2,schedule=interleaved", (4,)),
            "interleaved-cp": ("pp=2,cp=2,schedule=interleaved", (4,)),
            "interleaved-ep": ("pp=2,dp_replicate=2,ep=2,schedule=interleaved", (4,)),
            "gpipe-ddp": ("pp=2,dp_replicate=2,schedule=gpipe", (4,)),
            "looped_bfs-ddp": ("pp=2,dp_replicate=2,schedule=looped_bfs", (4,)),
            "interleaved_zb-ddp": ("pp=2,dp_replicate=2,schedule=interleaved_zb", (4,)),
            "zbv-ddp": ("pp=2,dp_replicate=2,schedule=zbv", (4,)),
            "dualpipev-ddp": ("pp=2,dp_replicate=2,schedule=dualpipev", (4,)),
            "gpipe-ep": ("pp=2,dp_replicate=2,ep=2,schedule=gpipe", (4,)),
            "looped_bfs-ep": ("pp=2,dp_replicate=2,ep=2,schedule=looped_bfs", (4,)),
            "interleaved_zb-ep": ("pp=2,dp_replicate=2,ep=2,schedule=interleaved_zb", (4,)),
            "zbv-ep": ("pp=2,dp_replicate=2,ep=2,schedule=zbv", (4,)),
            "dualpipev-ep": ("pp=2,dp_replicate=2,ep=2,schedule=dualpipev", (4,)),
            **{
                schedule: (f"pp=2,schedule={schedule}", (2,))
                for schedule in ("gpipe", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")
            },
        }
    ),
    *_rows({"pp-ring": ("pp=2,cp=2", (4,))}, "ring"),
]
# A promise, which changes what DDP waits for and nothing that a sample of pairs would have to cover.
STATIC = [Row("static_graph", "ddp", "ulysses", 2, ("layout.static_graph=true",))]
# Of more than four processes, which two cores have not often the time for: numbers that nothing divides by, and axes of
# unlike widths, where a group that is cut along the wrong one has another size.
LARGE = [
    *_rows({"ddp": ("ddp", (5, 6, 7)), "fsdp": ("fsdp", (5, 6, 7))}),
    *_rows(
        {
            "tp3-fsdp": ("tp=3,dp_shard=2", (6,)),
            "pp3-fsdp": ("pp=3,dp_shard=2", (6,)),
            "pp4-fsdp": ("pp=4,dp_shard=2", (8,)),
        }
    ),
    *_rows(
        {
            "hsdp-tp": ("dp_replicate=2,dp_shard=2,tp=2", (8,)),
            "hsdp-cp": ("dp_replicate=2,dp_shard=2,cp=2", (8,)),
            "fsdp-tp-pp": ("dp_shard=2,tp=2,pp=2", (8,)),
            "fsdp-tp-interleaved": ("dp_shard=2,tp=2,pp=2,schedule=interleaved", (8,)),
            "hsdp-pp": ("dp_replicate=2,dp_shard=2,pp=2", (8,)),
            "cp-fsdp-pp": ("dp_shard=2,cp=2,pp=2", (8,)),
            "cp-tp-pp": ("tp=2,cp=2,pp=2", (8,)),
            "cp-tp-ddp": ("dp_replicate=2,tp=2,cp=2", (8,)),
            "ep-shards-pp": ("dp_shard=4,pp=2,ep=2", (8,)),
            "cp-tp-ep": ("dp_shard=2,tp=2,cp=2,ep=2", (8,)),
        }
    ),
    *_rows({"ring-tp-fsdp": ("dp_shard=2,tp=2,cp=2", (8,))}, "ring"),
]
# The product of all axes, which a model without experts cannot have.
EVERYTHING = _rows({"everything": ("dp_shard=2,tp=2,cp=2,pp=2,ep=2", (16,))})
ALL = (*DATA, *TENSOR_PARALLEL, *CONTEXT, *EXPERTS, *PIPELINES, *LARGE, *EVERYTHING, *STATIC)
ROWS = {str(row): row for row in ALL}


def refusal(row: Row, model: str) -> str | None:
    """What a cell is refused with, a pattern; None: it trains."""
    layout = row.resolved
    if layout.pp > 1 and model == "gan":
        return r"pp=\d cuts one module, and model\(\) returned 3: use another layout"
    if layout.ep > 1 and model != "moe":
        return r"ep=\d cuts experts over ranks, and model\(\) has none"
    if layout.cp > 1 and model == "gan":
        return r"\S+ cuts the batch of one forward and one loss, and Pair has a step\(\) of its own: leave cp out"
    return None
