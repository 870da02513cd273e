"""From what was asked to what will run: config, Task and Run directory, checked before anything starts."""

import glob
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allranks import __version__
from allranks.config import (
    Config,
    changed_keys,
    check_resumable,
    check_text,
    override_config,
    read_task_spec,
    resolve_config,
)
from allranks.data.cut import cut_step
from allranks.errors import ConfigError, RunError
from allranks.home_directory import expand
from allranks.layout import Layout
from allranks.layout_refusals import refuse_float8, refuse_unsupported
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.slow_links import check_slow_links
from allranks.task import Task, TaskSpec, load_task_class
from allranks.training.anew import begin_anew, explain_anew, holds_nothing
from allranks.training.load import make_task, task_of_run
from allranks.training.plan_kept import decided_overrides, keep_plan, write_plan
from allranks.verdict import Decision

RUNS = Path("runs")
DEMO, DEMO_NAME = "allranks.training.demo:Text", "demo"
SKIP = "data.skip"
MICRO = ("train.micro_batch", "train.micro_steps")
CHANGED_BY_RUNS = (SKIP, *MICRO)  # after a rollback, after want of memory
FOLDERS = ("", "file", "local")  # kinds of mirrors, as fsspec has them in front of "://", that are paths here


@dataclass(frozen=True)
class Prepared:
    """What a request means.

    Attributes:
        config: resolved.
        spec: where the Task is, absolute; None for the built-in demo.
        task: the Task with its settings.
        kept: the Run that is continued, or None for a new one.
        replaced: a Run in which nothing was done, and in whose directory the new one begins.
        decisions: what was decided about that.
        plan: that decided its layout, to be kept in its directory; None where none did.
        unnamed: whether nobody names a layout: a plan decides it, or has done so when the run began.
    """

    config: Config
    spec: str | None
    task: Task
    kept: Run | None
    replaced: Run | None = None
    decisions: tuple[Decision, ...] = ()
    plan: Mapping[str, Any] | None = None
    unnamed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a plan decides the layout for several processes: the run is new, and nobody names one."""
        return self.kept is None and self.unnamed

    @property
    def name(self) -> str:
        """What the run is called."""
        return DEMO_NAME if self.spec is None else type(self.task).__name__.lower()


def prepare(request: TrainRequest) -> Prepared:
    """Resolve a request. Raises the errors of bad input that can be seen before a worker starts."""
    if request.run is not None and request.resume is not None:
        both = "--run and --resume both name a directory"
        raise ConfigError(f"{both}: --run starts or continues, --resume only continues")
    if request.resume is not None:
        return _prepare_resume(request, Run.open(request.resume))
    spec = _spec(request)
    defaults = load_task_class(spec).defaults
    kept = _existing(request.run)
    old = None if kept is None else kept.config()
    if kept is not None and old is not None and holds_nothing(kept):
        config = _resolve(request, defaults, None)
        if changed_keys(old, config) or _is_other_task(kept, spec):
            decision = explain_anew(kept, spec or DEMO, config)
            unnamed = not config.layout.chosen
            return Prepared(config, spec, make_task(spec, config), None, kept, (decision,), unnamed=unnamed)
    config = _resolve(request, defaults, old)
    unnamed = not config.layout.chosen
    if kept is not None and old is not None:
        kept.check_config()
        config = _keep_changed(_as_decided(config, kept), old, kept, request.change)
        _check_same_task(kept, spec)
        check_resumable(old, config, request.change)
    return Prepared(config, spec, make_task(spec, config), kept, unnamed=unnamed)


def _resolve(request: TrainRequest, defaults: Mapping[str, object], old: Config | None) -> Config:
    return _anchor(
        resolve_config(
            task_defaults=defaults, toml=request.toml, overrides=request.overrides, layout=request.layout, kept=old
        )
    )


def _as_decided(config: Config, kept: Run) -> Config:
    """What a plan decided at the first start holds on where nobody says otherwise."""
    cut = config.train.micro_batch is not None or config.train.micro_steps is not None
    words = [
        word
        for word in decided_overrides(kept)
        if not (config.layout.chosen if word.startswith("layout.") else cut)
    ]  # fmt: skip
    return override_config(config, words) if words else config


def _keep_changed(config: Config, old: Config, kept: Run, change: Sequence[str]) -> Config:
    """What the run has changed itself since the words of its first start were given holds on beside them."""
    config = _go_around(config, old, change)
    differs = any(config.flat()[name] != old.flat()[name] for name in MICRO)
    if not differs or any(name in change for name in MICRO) or not _ran_out_of_memory(kept):
        return config
    cut = {"micro_batch": old.train.micro_batch, "micro_steps": old.train.micro_steps}
    return config.model_copy(update={"train": config.train.model_copy(update=cut)})


def _ran_out_of_memory(run: Run) -> bool:
    return any(event["event"] == "verdict" and event.get("kind") == "out_of_memory" for event in run.events())


def _go_around(config: Config, old: Config, change: Sequence[str]) -> Config:
    """What rollbacks leave out holds on beside what the words name, until `--change data.skip` says otherwise."""
    if SKIP in change or not old.data.left_out.covers(config.data.left_out):
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"skip": old.data.skip})})


def resolve_layout(config: Config, world_size: int, nodes: int = 1) -> Layout:
    """The Layout of a world, refused where its degrees do not fit, or leave a rank without a sample."""
    layout = Layout.resolve(config.layout, world_size, nodes)
    refuse_unsupported(layout)
    if config.train.precision == "float8":
        refuse_float8(layout)
    check_slow_links(config, layout)
    cut_step(config.train, layout)
    return layout


def show_cut(config: Config, layout: Layout) -> dict[str, object]:
    """How a full step is cut: samples over micro-steps and data-parallel ranks."""
    train = config.train
    cut = cut_step(train, layout)
    shares = [sum(length for _, length in cut.spans(train.global_batch, rank)) for rank in range(layout.dp)]
    return {
        "global batch": f"{train.global_batch} samples",
        "data-parallel ranks": layout.dp,
        "micro-steps": cut.num_micro_steps(),
        "samples per rank": shares if len(shares) <= 8 else f"{min(shares)} to {max(shares)}",
    }


def open_run(prepared: Prepared, request: TrainRequest) -> Run:
    """The Run directory, new or continued, leased to this process, with the resolved config in it."""
    if prepared.kept is not None:
        kept = prepared.kept
        kept.acquire()
        # A run that lived until now may have gone around samples since the request was resolved.
        kept.write_config(_go_around(prepared.config, kept.config(), request.change))
        return kept
    facts: dict[str, Any] = {
        "task": prepared.spec or DEMO,
        "allranks": __version__,
        "torch": torch.__version__,
        "argv": sys.argv,
        "config_digest": config_digest(prepared.config),
    }
    if prepared.replaced is not None:
        begin_anew(prepared.replaced, prepared.name, prepared.config, facts)
        run = prepared.replaced
    else:
        run = Run.create(RUNS, prepared.name, prepared.config, facts, directory=request.run)
        run.acquire()
    keep_plan(run, request.toml)
    if prepared.plan is not None:
        write_plan(run, prepared.plan)
    return run


def config_digest(config: Config, *, but: Sequence[str] = ()) -> str:
    """A short name of a config's content, `but` keys aside."""
    told = {name: value for name, value in config.flat().items() if name not in but}
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _prepare_resume(request: TrainRequest, kept: Run) -> Prepared:
    if request.toml is not None:
        raise ConfigError(f"--resume takes the config of {kept.path}; give single keys instead of {request.toml}")
    if request.task_spec is not None:
        _check_same_task(kept, _absolute(request.task_spec, Path.cwd()))
    kept.check_config()
    old = kept.config()
    config = _go_around(_anchor(override_config(old, request.overrides, request.layout)), old, request.change)
    check_resumable(old, config, request.change)
    decided = any(word.startswith("layout.") for word in decided_overrides(kept))
    unnamed = (decided or not old.layout.chosen) and config.layout == old.layout
    return Prepared(config, kept.task, task_of_run(kept, config), kept, unnamed=unnamed)


def _anchor(config: Config) -> Config:
    """`data.text` and a mirror in a folder seen from here, so that a resume from another folder has the same. Raises
    ConfigError.
    """
    config, text = anchor_mirror(config), config.data.text
    if text is not None:
        seen = str(Path(glob.escape(str(Path.cwd()))) / expand(text))
        config = config.model_copy(update={"data": config.data.model_copy(update={"text": seen})})
    check_text(config)
    return config


def anchor_mirror(config: Config) -> Config:
    """A mirror in a folder (`backup`, `file://backup`) as that folder's path, seen from here; an object store's as it
    is. Raises ConfigError.
    """
    kind, _, path = (config.checkpoint.mirror or "").rpartition("://")
    if kind not in FOLDERS or not path:
        return config
    seen = str(Path.cwd() / expand(path))
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"mirror": seen})})


def _existing(path: Path | None) -> Run | None:
    if path is None or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    return Run.open(path)


def _spec(request: TrainRequest) -> str | None:
    if request.task_spec is not None:
        return _absolute(request.task_spec, Path.cwd())
    named = read_task_spec(request.toml) if request.toml is not None else None
    return None if named is None else _absolute(named, Path.cwd())


def _absolute(spec: str, folder: Path) -> str:
    return str(TaskSpec.parse(spec, folder))


def _check_same_task(kept: Run, spec: str | None) -> None:
    if _is_other_task(kept, spec):
        raise RunError(
            f"{kept.path} is a run of {kept.task}, not of {spec or DEMO}: name another directory, or that task"
        )


def _is_other_task(kept: Run, spec: str | None) -> bool:
    asked = spec or DEMO
    return asked.partition(":")[0] != kept.task.partition(":")[0] or _differ(asked, kept.task)


def _differ(asked: str, kept: str) -> bool:
    names: Sequence[str] = (asked.partition(":")[2], kept.partition(":")[2])
    return all(names) and names[0] != names[1]
