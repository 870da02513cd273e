"""The trained model back on one device."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.reading import held
from allranks.checkpointing.restore import read_model_values
from allranks.checkpointing.writers import tell_writers
from allranks.config import Config
from allranks.errors import CheckpointError, ConfigError, TaskError
from allranks.own_loops import refuse_own_loop
from allranks.parallel.extra_state import extra_states
from allranks.run import Run
from allranks.task import Task, load_task, load_task_class
from allranks.task_loading import setting_types
from allranks.training.newest import newest_of_run


def load(path: str | Path, task: Task | str | None = None, *, ema: bool = False) -> nn.Module | dict[str, nn.Module]:
    """The model that a run trained, on the CPU, in evaluation mode; several by name where the Task has several.

    Warns where a newer checkpoint of the run is damaged and an older one is taken.

    Args:
        path: a Run directory (its newest good checkpoint), or one `step-*` directory.
        task: the Task, or its spec, which in a Run gets the run's settings. A Run names its own; a bare checkpoint
            names no code, so there it is required.
        ema: with the average of the parameters that `train.ema` kept, which validation has measured.

    Raises:
        RunError, CheckpointError: there is no run, or no whole checkpoint, or it holds no average.
        TaskError: `task` is missing, cannot be loaded, or makes another model than the checkpoint holds.
    """
    path = Path(path)
    if (path / "run.json").is_file():
        run = Run.open(path)
        checkpoint, skipped = newest_of_run(run.checkpoints, run.id)
        if checkpoint is None:
            raise CheckpointError(f"{run.checkpoints} holds no checkpoint yet: nothing to load")
        with held(checkpoint.path):  # the run may go on, and a Task may take long to be made
            for line in tell_writers((run.path, run.checkpoints)):
                warnings.warn(line, stacklevel=2)
            for reason in skipped:
                warnings.warn(f"{checkpoint.path.name} is loaded, not the newest: {reason}", stacklevel=2)
            if task is None:
                task = task_of_run(run)
            made = task if isinstance(task, Task) else make_task(task, run.config())
            return read_model(checkpoint, made, ema=ema)
    checkpoint = Checkpoint.open(path)
    if task is None:
        raise TaskError(f"{path} is a checkpoint, which names no code: say load(path, task='file.py:Name')")
    return read_model(checkpoint, load_task(task) if isinstance(task, str) else task, ema=ema)


def read_model(checkpoint: Checkpoint, task: Task, *, ema: bool = False) -> nn.Module | dict[str, nn.Module]:
    """The Task's model with the values of `checkpoint`, or with the averages in it."""
    # The initial values are replaced: no random number of the caller's is spent on them.
    with torch.random.fork_rng(devices=()):
        built = task.model()
    modules = {"": built} if isinstance(built, nn.Module) else dict(built)
    with held(checkpoint.path):
        for which, module in modules.items():
            _load_strictly(module, read_model_values(checkpoint, which, ema=ema), checkpoint)
            module.eval()
    return built if isinstance(built, nn.Module) else modules


def make_task(spec: str | None, config: Config) -> Task:
    """The Task of `spec` with the settings of `config`; `data.text` goes to a Task that has a setting `text`."""
    settings = dict(config.task)
    if config.data.text is not None:
        settings["text"] = config.data.text
    task_class = load_task_class(spec)  # a Task is made once: that may take long
    if "text" in settings and "text" not in setting_types(task_class, Task):
        raise ConfigError(f"data.text is set, but {task_class.__name__} has no setting `text: str | None` to take it")
    return load_task(spec, settings)


def task_of_run(run: Run, config: Config | None = None) -> Task:
    """The Task that `run` trains, with its settings or those of `config`. Raises TaskError for a loop of one's own."""
    refuse_own_loop(run.task, run.path)
    return make_task(run.task, config or run.config())


def _load_strictly(module: nn.Module, values: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    _cast_as_trained(module, values)
    # No checkpoint holds extra state: it stays as it was made.
    made = module.state_dict() if (extra := extra_states(module)) else {}
    own = {key: made[key] for key in extra if key in made}
    try:
        module.load_state_dict({**values, **own}, strict=True)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:400]
        raise TaskError(f"{checkpoint.path.name} holds another model than model() makes: {first}") from error


def _cast_as_trained(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give the module the type of its trained parameters; `module.to` would also make complex buffers real."""
    parameters = {name: p for name, p in module.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}
    made = {parameter.dtype for parameter in parameters.values() if parameter.is_floating_point()}
    trained = {values[name].dtype for name in parameters if name in values and values[name].is_floating_point()}
    if torch.float64 in trained - made:
        module.double()
    elif trained != made:
        module.float()
