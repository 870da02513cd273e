"""`allranks bench scaling`: what more processes save, and what they cost, on a real task."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from allranks.cli.output import print_error, print_json, write_printed
from allranks.cli.scaling_rows import print_rows, render_plot
from allranks.cli.train import read_arguments
from allranks.durable import check_target, write_whole
from allranks.errors import ConfigError, ProcessError
from allranks.process_environment import num_cores
from allranks.units import format_seconds

if TYPE_CHECKING:
    from allranks.benchmarking.scaling import Mode, Point, Row, Trained
    from allranks.verdict import Decision

STEPS, REPEATS = 60, 3
QUICK_STEPS, QUICK_REPEATS = 20, 1
LAYOUTS, QUICK_LAYOUTS = "ddp;fsdp", "ddp"
UNDETERMINED = 3
SET_HERE = ("train.steps=", "train.epochs=")

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TASK|RUN.toml|KEY=VALUE",
        help="What to train, as for `allranks train`; train.global_batch is the batch of strong scaling, and that of "
        "one process in weak scaling.",
        show_default=False,
    ),
]
Numbers = Annotated[
    str | None,
    typer.Option(
        metavar="N,N", help="Numbers of processes; not given: 1, 2, 4 ... up to the GPUs or cores.", show_default=False
    ),
]
Layouts = Annotated[
    str | None,
    typer.Option(
        metavar="L;L",
        help=f"Layouts to compare, with layout keys behind them; not given: {LAYOUTS}.",
        show_default=False,
    ),
]
Scaling = Annotated[
    Literal["strong", "weak", "both"] | None,
    typer.Option(
        help="The same global batch, one that grows with the processes, or both (the default).", show_default=False
    ),
]
Steps = Annotated[int, typer.Option(metavar="N", min=10, help="Steps of each run; the first 5 are not timed.")]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each, by turns.")]
Limit = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="How long a run may write no step before it is taken to hang, and killed; not given: 1800.",
        show_default=False,
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help="Draw speed-up, efficiency and memory.", show_default=False)
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="One run each of 20 steps, without evaluation; ddp and strong where nothing else is said."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")]


def scaling(
    arguments: Words = None,
    nproc: Numbers = None,
    layouts: Layouts = None,
    mode: Scaling = None,
    steps: Steps = STEPS,
    repeats: Repeats = REPEATS,
    limit: Limit = None,
    device: Device = "auto",
    plot: Plot = None,
    quick: Quick = False,
    json: Json = False,
) -> int:
    """The same task on one process and more: time saved, efficiency, memory per process, loss reached.

    Every figure is from the journal of a run of `allranks train`. Strong scaling shares one global batch among more
    processes, and reaches the same loss; weak scaling gives each process as much as one had, which is another training.
    Exit code 0: measured; 2: refused; 3: a run did not end as it should.
    """
    from allranks.benchmarking.strategies import read_layouts, read_numbers

    words = _check_words(arguments or ())
    strategies = read_layouts((QUICK_LAYOUTS if quick else LAYOUTS) if layouts is None else layouts)
    numbers = None if nproc is None else read_numbers(nproc)
    _check_plot(plot)
    if quick:
        words, steps, repeats = (*words, "evaluate.every=0"), min(steps, QUICK_STEPS), QUICK_REPEATS
    asked = mode or ("strong" if quick else "both")
    modes: tuple[Mode, ...] = ("strong", "weak") if asked == "both" else (asked,)

    from allranks.benchmarking import machine, scaling, training_runs

    sizes = numbers or scaling.default_nproc(machine.num_devices(device))
    points = scaling.plan_points(strategies, sizes, modes, training_runs.ask_config(words, device))
    most = max(point.layout.world_size for point in points)
    gpu = machine.has_gpu(device)
    threads, decisions = scaling.decide_threads(most, num_cores(), os.environ.get("OMP_NUM_THREADS", ""), gpu=gpu)
    for decision in decisions:
        print(f"- {decision}", file=sys.stderr)
    about = machine.describe_machine(device)
    command = training_runs.Command(words, steps, device, threads, limit or training_runs.LIMIT_SECONDS)
    try:
        found = training_runs.measure_all(points, command, repeats, tell=_teller(len({p.run for p in points}), repeats))
    except ProcessError as error:
        return print_error(error, json=json, exit_code=UNDETERMINED)
    rows = scaling.summarise(points, found)
    if json:
        print_json(_document(words, steps, rows, decisions, about))
    else:
        print_rows(rows)
    return 0 if plot is None else write_printed(lambda: write_whole(plot, render_plot(rows)))


def _check_words(arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments, told apart as `allranks train` does. Raises ConfigError, also for a key that is set here."""
    _, _, overrides = read_arguments(arguments)
    for override in overrides:
        if override.startswith(SET_HERE):
            raise ConfigError(
                f"'{override}': bench scaling makes equally many steps in each run: say how many by --steps"
            )
    return tuple(arguments)


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix != ".html":
        raise ConfigError(f"--plot {plot}: expected a name that ends in .html")
    if not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: {plot.parent} is no directory; make it, or name another place")
    check_target(plot)


def _teller(num_runs: int, repeats: int) -> Callable[[int, "Point", "Trained"], None]:
    done = 0

    def tell(repeat: int, point: "Point", trained: "Trained") -> None:
        nonlocal done
        done += 1
        step = format_seconds(trained.step_seconds)
        print(f"{done}/{num_runs * repeats}  {point}: {step} a step", file=sys.stderr)

    return tell


def _document(
    words: Sequence[str], steps: int, rows: "Sequence[Row]", decisions: "Sequence[Decision]", about: dict[str, object]
) -> dict[str, object]:
    return {
        "arguments": list(words),
        "steps": steps,
        "machine": about,
        "decisions": [{"what": decision.what, "because": decision.because} for decision in decisions],
        "rows": [row.to_json() for row in rows],
    }
