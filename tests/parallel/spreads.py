"""Modules spread as a worker spreads them, for the tests beside."""

from typing import Any

import torch
import torch.distributed as dist

from allranks.layout import Layout
from allranks.parallel.initial import Source
from allranks.parallel.mesh import build_mesh
from allranks.parallel.parallelize import parallelize
from allranks.parallel.precision import choose_precision
from allranks.parallel.spread import Spread

SINGLE = Layout(kind="single")


def seed() -> None:
    torch.manual_seed(0)


def spread(build: Any, layout: Layout = SINGLE, precision: str = "float32", **options: Any) -> Spread:
    """`build` under `layout`, in this process or in a worker."""
    mesh = options.pop("mesh", None) or build_mesh(layout, "cpu")
    device = options.pop("device", torch.device("cpu"))
    group = dist.group.WORLD if mesh.device_mesh is not None else None
    return parallelize(
        build,
        mesh,
        choose_precision(precision, None, device.type),
        device,
        source=Source(group, 0, mesh.rank == 0),
        seed=seed,
        **options,
    )
