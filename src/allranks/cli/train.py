"""`allranks train`: from arguments told apart by their form to one TrainRequest, and one call."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from allranks.errors import ConfigError
from allranks.failure import TRANSIENT, StoppedBeforeStart
from allranks.hosts_request import read_hosts
from allranks.request import TrainRequest
from allranks.surviving.interrupts import stopped_before_start

# torchrun takes a bare --run for an abbreviation of its own --run-path, even behind the program's name.
RUN_NAMES = ("--run", "--run-dir")
FORMS = "expected a task (file.py, file.py:Name or package.module:Name), a config (RUN.toml) or key.sub=value"
_KEY = re.compile(r"[A-Za-z_][\w.-]*=")
_TASK_FILE = re.compile(r".+\.py(:[A-Za-z_]\w*)?")
_TASK_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


ShowSharding = Annotated[
    bool, typer.Option("--show-sharding", help="Make one step, print what it gathers and reduces with bytes, and stop.")
]
Change = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="Let a resume change this key, although it changes what the run means.",
        show_default=False,
    ),
]

Nodes = Annotated[
    str | None,
    typer.Option(metavar="N|MIN:MAX", help="Hosts: the same command on each.", show_default=False),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        metavar="c10d://HOST:PORT|etcd://HOST:PORT,.../NAME",
        help="Where they meet: a free port of one of them, or an etcd, with which any of them may be lost.",
        show_default=False,
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(metavar="F", help="The secret that they share (mode 0600); else ALLRANKS_SECRET.", show_default=False),
]


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK|RUN.toml|KEY=VALUE",
            help="What to train (file.py, file.py:Name or package.module:Name; none: the built-in demo), "
            "a config file, and config keys, which beat the file.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="L", help="How to spread it: single, ddp, fsdp, hsdp, dp_shard=4,dp_replicate=2 ..."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes on this machine.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(*RUN_NAMES, metavar="DIR", help="The run directory: a new one starts, an existing one continues."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    show: Annotated[bool, typer.Option("--show", help="Print config, batch cut and decisions, and stop.")] = False,
    show_sharding: ShowSharding = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the run in this directory.")] = None,
    change: Change = None,
    nodes: Nodes = None,
    rendezvous: Rendezvous = None,
    secret_file: SecretFile = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Train a model on the devices of this machine, or with --nodes of several.

    Started by torchrun, srun or mpirun, it is one process of theirs. Exit code 0: trained; 1: it failed; 2: refused;
    75: stopped and saved; 76: ended from outside (after both start it again); 78: refused once it had begun; 93: a
    guard ended it; 130: stopped at once.
    """
    task_spec, toml, overrides = read_arguments(arguments or ())
    if run is not None and resume is not None:
        raise ConfigError(f"--run {run} and --resume {resume} both name the run directory: give one of them")
    if resume is not None and toml is not None:
        raise ConfigError(f"--resume continues with the run's own config.toml: give key=value instead of {toml}")
    if show and show_sharding:
        raise ConfigError("--show prints what a run would be, and --show-sharding makes a step of it: give one of them")
    request = TrainRequest(
        task_spec=task_spec,
        toml=toml,
        overrides=overrides,
        layout=layout,
        nproc=nproc,
        run=run,
        resume=resume,
        device=device,
        show=show,
        show_sharding=show_sharding,
        json=json,
        change=tuple(change or ()),
        hosts=read_hosts(nodes, rendezvous, secret_file),
    )
    return _start(request)


def _start(request: TrainRequest) -> int:
    """The exit code. Who is asked to stop while this process still imports and plans has nothing to save."""
    try:
        with stopped_before_start():
            from allranks.cli.running import train as start_training

            return start_training(request)
    except StoppedBeforeStart as stopped:
        print(f"stopped by {stopped.name} before the run started: start it again", file=sys.stderr, flush=True)
        return TRANSIENT


def read_arguments(arguments: Sequence[str]) -> tuple[str | None, Path | None, tuple[str, ...]]:
    """The task, the TOML file and the overrides among `arguments`. Raises ConfigError for one of another form."""
    tasks: list[str] = []
    tomls: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        _find_place(argument, tasks, tomls, overrides).append(argument)
    for found, noun in ((tasks, "tasks"), (tomls, "config files")):
        if len(found) > 1:
            raise ConfigError(f"'{found[0]}' and '{found[1]}' are two {noun}: give one")
    return tasks[0] if tasks else None, Path(tomls[0]) if tomls else None, tuple(overrides)


def _find_place(argument: str, tasks: list[str], tomls: list[str], overrides: list[str]) -> list[str]:
    """The list that `argument` belongs to, by its form alone."""
    if _KEY.match(argument):
        return overrides
    if argument.endswith(".toml"):
        return tomls
    if _TASK_FILE.fullmatch(argument) or _TASK_MODULE.fullmatch(argument):
        return tasks
    near = [name for name in (f"{argument}.py", f"{argument}.toml") if Path(name).is_file()]
    advice = f"; did you mean '{near[0]}'?" if near else f"; {FORMS}"
    raise ConfigError(f"argument '{argument}' is neither a task nor a config nor a key{advice}")
