"""`allranks simulate`: a run of days with failures, at a scale that nobody can try."""

from pathlib import Path
from typing import Annotated, Any

import typer

from allranks.simulation_request import SimulationRequest


def _option(name: str, text: str, metavar: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False)


Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TASK|NAME|config.json] [RUN.toml] [KEY=VALUE]",
        help="What runs, as for `allranks plan`: it gives the step's time and the checkpoint's bytes. Without one: "
        "--step and --save-cost.",
        show_default=False,
    ),
]
FAILURES = _option("--failures", "llama3 (default), rsc-1, rsc-2, failures in 1000 node-days, or a TOML file.", "F")
STORAGE = _option(
    "--storage", "What the storage takes from all nodes together; not given: the cluster file's, or Llama 3's.", "GB/S"
)
EVERY = _option("--every", "Between two checkpoints: 10min, 1h; not given: what Daly's formula says.", "TIME")
SAVE = _option("--save-cost", "That a checkpoint stops training; not given: its copy to the host's memory.", "TIME")
PEER = _option("--peer-every", "Between copies in a peer's memory, which survive a node, but not a rack.", "TIME")
SPARES = _option("--spares", "Nodes beside those of --cluster; not given: enough in 999 of 1000 moments.", "N")
ELASTIC = typer.Option("--elastic", help="Go on with fewer data-parallel replicas where no spare is left.")
JSON = typer.Option("--json", help="One JSON document on standard output, all else on standard error.")


def simulate(
    cluster: Annotated[str, _option("--cluster", "2048x8:h100; see `allranks plan`.", "C")],
    arguments: Arguments = None,
    days: Annotated[float, _option("--days", "How long the run lasts; 30 if not given.", "DAYS")] = 30.0,
    failures: Annotated[str, FAILURES] = "llama3",
    layout: Annotated[str | None, _option("--layout", "As in `allranks plan`; not given: searched.", "L")] = None,
    global_batch: Annotated[int | None, _option("--global-batch", "Samples per optimizer step.", "N")] = None,
    step: Annotated[str | None, _option("--step", "Of one optimizer step; not given: planned.", "TIME")] = None,
    every: Annotated[str | None, EVERY] = None,
    save_cost: Annotated[str | None, SAVE] = None,
    load: Annotated[
        str | None, _option("--load", "To read a checkpoint; not given: bytes over storage.", "TIME")
    ] = None,
    storage: Annotated[float | None, STORAGE] = None,
    peer_every: Annotated[str | None, PEER] = None,
    detect: Annotated[str, _option("--detect", "From a failure until it is known; 15s if not given.", "TIME")] = "15s",
    restart: Annotated[str, _option("--restart", "From then on until it trains; 5min if not given.", "TIME")] = "5min",
    spares: Annotated[int | None, SPARES] = None,
    elastic: Annotated[bool, ELASTIC] = False,
    runs: Annotated[int | None, _option("--runs", "Simulated; not given: by how often it fails.", "N")] = None,
    seed: Annotated[int, _option("--seed", "Of what is drawn; 0 if not given.", "N")] = 0,
    html: Annotated[Path | None, _option("--html", "Write the plots as one page.", "FILE")] = None,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Say how much of a long run ends as training, where the rest goes, and which interval and how many spares pay.

    Exit code 0: simulated; 2: refused.
    """
    options = dict(locals())
    from allranks.cli.simulating import answer

    return answer(SimulationRequest(**{**options, "arguments": tuple(arguments or ())}))
