"""The second door: `allranks.join`, for people who keep their own loop. The same laws, one call each."""

import os
from collections.abc import Sequence
from pathlib import Path

from allranks.data.random_keys import seed_all
from allranks.errors import ConfigError
from allranks.recorded import forget_error
from allranks.stepping.session import model_key
from allranks.training.own.ground import JOINED, prepare_ground
from allranks.training.own.world import World

__all__ = ["World", "join"]


def join(
    layout: str | None = None,
    *,
    seed: int = 0,
    precision: str = "float32",
    device: str = "auto",
    backend: str = "auto",
    run: str | os.PathLike[str] | None = None,
    keep: int = 2,
    change: Sequence[str] = (),
    **keys: object,
) -> "World":
    """Join the processes of this launch (torchrun, srun, mpirun, `allranks.launch`), or be one alone; collective.

    What it returns is a context manager. Where the script has started torch.distributed itself, that process group is
    used, and left as it is.

    Args:
        layout: the layout string; None: what `allranks.launch` was given, else ddp over all processes.
        seed: of the generators from here on, so of a model that is built next, and of the data's order.
        precision: "float32", "float64", or "bfloat16" and "float16": forwards run under autocast, and under float16 the
            loss is scaled.
        device: "auto", "cpu" or "cuda".
        backend: "auto", "nccl", "gloo" or "mpi".
        run: a Run directory: a new one starts there, one that is there is continued by `world.resume`. None: a new one
            below `runs/`, as soon as there is something to write.
        keep: newest checkpoints that are kept.
        change: config keys that may differ from the run's first start, such as "train.global_batch".
        keys: of the section layout what a layout string has not, as a Run's TOML file names it: `ddp_hook="bfloat16"`,
            `local_sgd=100`, `placement={"head": "cuda:1"}`, but no `static_graph`; of the section guard those of the
            sentinels: `digest_every`, `on_finding`, `mute`; of the section checkpoint `mirror="s3://bucket/folder"`
            and `keep_every`.

    Raises:
        ConfigError, LayoutError: an argument is wrong, or this process has joined already.
        ProcessError: the other processes cannot be reached.
    """
    if JOINED:
        raise ConfigError(
            f"join() in a process that is {JOINED[0]} already: leave that world's `with` first "
            "(after an error in one of several processes, start anew)"
        )
    forget_error()  # of a world before: this process goes on
    ground = prepare_ground(
        layout,
        seed=seed,
        precision=precision,
        device=device,
        backend=backend,
        keep=keep,
        directory=None if run is None else Path(run),
        change=change,
        keys=keys,
    )
    world = World(ground)
    JOINED.append(world)
    seed_all(model_key(seed))
    return world
