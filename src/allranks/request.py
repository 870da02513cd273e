"""TrainRequest: what `allranks train` was asked, as one value; everything that starts a run takes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from allranks.hosts_request import HostsRequest


@final
@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The arguments of `allranks train`, told apart but not yet checked against each other.

    Attributes:
        task_spec: `file.py`, `file.py:Name` or `package.module:Name`; None: the TOML file's, else the built-in demo.
        toml: the user's TOML file.
        overrides: `key.sub=value` arguments, in their order.
        layout: the layout string of `--layout`.
        nproc: processes on this machine.
        run: the Run directory to start in or to continue.
        resume: the Run directory to continue.
        device: "auto", "cpu" or "cuda".
        show: print config, batch cut and decisions, and stop.
        show_sharding: make one step, print what it gathered, computed and reduced, and stop.
        json: one JSON document on standard output, everything else on standard error.
        change: keys that a resume may change although they change what the run means.
        hosts: the other hosts of the run; None: this one is alone.
    """

    task_spec: str | None = None
    toml: Path | None = None
    overrides: tuple[str, ...] = ()
    layout: str | None = None
    nproc: int | None = None
    run: Path | None = None
    resume: Path | None = None
    device: str = "auto"
    show: bool = False
    show_sharding: bool = False
    json: bool = False
    change: tuple[str, ...] = ()
    hosts: HostsRequest | None = None
