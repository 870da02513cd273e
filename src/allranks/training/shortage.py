"""Memory that ran out in a step: the same step in smaller forwards, or the advice where that would be another step.

An evaluation has forwards as large as a step's, so that the same helps there. Where samples are loaded and collated it
helps nothing: as many are held at a time, and what the dataset takes for one of them stays.

The worker says what happened and ends; the agent has all of them start again from the newest checkpoint. The global
batch and the order of its samples stay, and the loss is a sum over them, so that only rounding tells the difference.
"""

from allranks.config import Config
from allranks.data.cut import Cut, cut_step
from allranks.data.loader import came_from_loader
from allranks.errors import AllranksError, MemoryShortError
from allranks.failure import is_out_of_memory
from allranks.layout import Layout
from allranks.run import Run
from allranks.stepping.session import Session

OTHER_MOVES = "layout.recompute=full, layout.offload, or a layout that shards more"
ALONE_MOVES = (
    "layout.recompute=full, layout.offload=activations (on a GPU), or more processes on more devices with a layout "
    "that shards (one has nobody to share with)"
)


def is_shortage(error: BaseException) -> bool:
    """Whether memory ran out in what is computed, rather than in the user's dataset or `collate`."""
    return is_out_of_memory(error) and not came_from_loader(error)


def explain_shortage(
    session: Session, error: BaseException, *, where: str = "a step", samples: int | None = None
) -> MemoryShortError:
    """The error of a worker that met `error`, a failed allocation, in forwards of `samples` (None: those of a step)."""
    samples = samples or samples_per_forward(session.stream.cut)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    moves = ALONE_MOVES if session.processes.mesh.layout.kind == "single" else OTHER_MOVES
    what = f"memory ran out in {where}, with {samples} sample(s) a forward on each rank ({first})"
    if session.fixed:
        steps = session.stream.cut.num_micro_steps()
        why = "what this task learns depends on which samples share a forward (batch statistics, or a coupled loss)"
        move = f"say `--change train.micro_steps train.micro_steps={2 * steps}`, or use {moves}"
        return MemoryShortError(f"{what}; they are not made smaller, because {why}: {move}", divisible=False)
    if samples < 2:
        return MemoryShortError(f"{what}, and a forward has no fewer: use {moves}", divisible=False)
    return MemoryShortError(f"{what}: use a smaller train.micro_batch, or {moves}", divisible=True)


def halve_micro_batch(run: Run, num_processes: int) -> str | None:
    """Have the run's next attempt feed half as many samples a forward; what it has set, None where nothing fits."""
    config = run.config()
    found = halve(config, Layout.resolve(config.layout, num_processes))
    if found is None:
        return None
    run.write_config(found)
    return f"train.micro_batch={found.train.micro_batch}"


def halve(config: Config, layout: Layout) -> Config | None:
    """The config with half as many samples a forward, or the next fewer that the layout takes; None: there is none.

    The number of forwards must not be fixed.
    """
    for samples in range(samples_per_forward(cut_step(config.train, layout)) // 2, 0, -1):
        train = config.train.model_copy(update={"micro_batch": samples, "micro_steps": None})
        try:
            cut_step(train, layout)
        except AllranksError:
            continue
        return config.model_copy(update={"train": train})
    return None


def samples_per_forward(cut: Cut) -> int:
    """The most samples that one rank feeds in one forward."""
    return -(-cut.global_batch // (cut.num_micro_steps() * cut.num_ranks))
