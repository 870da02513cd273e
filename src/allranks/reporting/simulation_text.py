"""A Simulation as text, for a terminal of 100 columns."""

import math

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from allranks.reporting.as_text import as_text
from allranks.simulation import CAUSES, DAY, Interval, Operation, Outcome, Simulation
from allranks.units import format_seconds

WIDTH = 100
SURE_OF_TWO_DIGITS = 5e-4
"""A share that another seed moves by less, one standard deviation, is told with two digits behind the point."""
MEANINGS = {
    "productive": "training that the end still has",
    "redone": "steps lost by a failure, done again",
    "saving": "stopped by a checkpoint",
    "stragglers": "waiting for slow nodes",
    "shrunk": "fewer nodes than the run wants",
    "detecting": "a failure that nobody knows of yet",
    "restarting": "processes, network, reading the checkpoint",
    "waiting": "no spare left, nodes under repair",
}


def render_simulation(found: Simulation, *, width: int = WIDTH) -> str:
    """The whole of it, the answer first, at most `width` columns wide."""
    parts: list[RenderableType] = [*_verdict(found), Text(), Text("Where the time goes"), _shares(found)]
    parts += [Text(), Text("Time between checkpoints"), _intervals(found), Text(say_interval(found), overflow="fold")]
    parts += [Text(), Text("Spare nodes"), _spares(found), Text(say_spares(found), overflow="fold")]
    parts += [Text(), Text(say_faster(found), overflow="fold"), Text(), Text("Decided for you")]
    parts += [Text(f"  {note}", overflow="fold") for note in (*found.notes, say_source(found))]
    return as_text(parts, width)


def _verdict(found: Simulation) -> list[RenderableType]:
    chosen = found.chosen
    operation = chosen.operation
    what = f"{found.model} on {found.cluster}" if found.model else f"A run on {found.cluster}"
    devices = operation.nodes * found.devices_per_node
    between = operation.seconds / max(chosen.interruptions.mean, 1e-9)
    often = f", one every {format_seconds(between)}" if chosen.interruptions.mean >= 1 else ""
    return [
        Text(f"{what}: {devices:,} devices for {operation.seconds / DAY:g} days", overflow="fold"),
        Text(f"Goodput {say_percent(chosen.goodput)}: so much of the time ends as training", overflow="fold"),
        Text(f"  {_say_runs(chosen)}", overflow="fold"),
        Text(f"Interruptions {_say_number(chosen.interruptions)}{often}", overflow="fold"),
        Text(_say_formula(found), overflow="fold"),
    ]


def _say_runs(chosen: Outcome) -> str:
    """How sure the mean is, and that no table has another one."""
    num, error = chosen.num_runs, say_error(chosen.errors["productive"])
    if num == 1:
        return "One run: how sure that is nobody can say; every table is of the same run"
    return f"The mean of {num} runs, {error} points; in brackets the middle 90%; every table is of the same {num}"


def say_share(share: float, error: float) -> str:
    """`99.82%`, or `66.0%` where another seed would move the second digit behind the point."""
    return f"{share:.1%}" if error >= SURE_OF_TWO_DIGITS else f"{share:.2%}"


def say_error(error: float) -> str:
    """`+-0.02`, in points; rounded up, for what was drawn is never quite sure."""
    return f"+-{math.ceil(error * 1e4 - 1e-6) / 100:.2f}"


def _say_formula(found: Simulation) -> str:
    if found.formula is None:
        return f"No formula beside it, because {found.formula_because}"
    return f"By formula {found.formula:.1%} ({found.formula_because})"


def say_percent(span: Interval) -> str:
    """`94.1% (93.6 to 94.6)`: the mean and the middle 90% of the runs."""
    return f"{span.mean:.1%} ({100 * span.low:.1f} to {100 * span.high:.1f})"


def _say_number(span: Interval) -> str:
    return f"{span.mean:,.0f} ({span.low:,.0f} to {span.high:,.0f})"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 2, 0, 0))
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="left" if place in (0, len(columns) - 1) else "right", overflow="fold")
    return table


def _shares(found: Simulation) -> Table:
    table = _table("cause", "share", "device-days", "")
    operation = found.chosen.operation
    whole = operation.nodes * found.devices_per_node * operation.seconds / DAY
    for cause in CAUSES:
        share = found.chosen.shares[cause]
        if cause == "productive" or share >= 5e-5:
            said = say_share(share, found.chosen.errors[cause])
            table.add_row(cause, said, f"{share * whole:,.0f}", MEANINGS[cause])
    return table


def every_of(outcome: Outcome) -> float:
    """Seconds between two saves to the slowest tier."""
    return outcome.operation.tiers[-1].every_seconds


def _intervals(found: Simulation) -> Table:
    table = _table("every", "goodput", "against yours", "")
    for outcome in found.intervals:
        every = every_of(outcome)
        marks = [
            word
            for word, there in (
                ("best", every == found.best_every_seconds),
                ("yours", every == every_of(found.chosen)),
                ("no save within the run", every >= outcome.operation.seconds),
            )
            if there
        ]
        table.add_row(format_seconds(every), _goodput(outcome), _against(outcome, found.chosen), ", ".join(marks))
    return table


def _goodput(outcome: Outcome) -> str:
    return say_share(outcome.goodput.mean, outcome.errors["productive"])


def _against(outcome: Outcome, chosen: Outcome) -> str:
    """`-0.03 +-0.01`: points that it has beyond the user's own in the same runs, which are surer than either."""
    return "" if outcome.operation == chosen.operation else _say_gained(outcome)


def _say_gained(outcome: Outcome) -> str:
    gained = 100 * outcome.gained
    text = f"{gained if abs(gained) >= 0.005 else 0.0:+.2f}"  # no -0.00
    return text if outcome.num_runs == 1 else f"{text} {say_error(outcome.gained_error)}"


def say_interval(found: Simulation) -> str:
    """What the formulas say of the interval between checkpoints."""
    if found.young_seconds is None or found.daly_seconds is None:
        if found.chosen.operation.tiers[-1].stall_seconds:
            return "  Nothing fails: no save is needed (Young and Daly: infinite)"
        return "  A save costs training nothing: the shortest interval is the best (Young and Daly: 0)"
    formulas = f"Young {format_seconds(found.young_seconds)}, Daly {format_seconds(found.daly_seconds)}"
    alone = ", which know of one kind of copy alone" if len(found.chosen.operation.tiers) > 1 else ""
    return f"  By formula: {formulas}{alone}; by simulation {format_seconds(found.best_every_seconds)}"


def _spares(found: Simulation) -> Table:
    table = _table("spares", "goodput", "against yours", "waiting", "work per node", "")
    for outcome in found.spares:
        number = outcome.operation.spares
        marks = [word for word, its in (("best", found.best_spares), ("yours", _own_spares(found))) if number == its]
        paid = outcome.goodput.mean * outcome.operation.nodes / (outcome.operation.nodes + number)
        waiting = say_share(outcome.shares["waiting"], outcome.errors["waiting"])
        beside = _against(outcome, found.chosen), waiting, say_share(paid, outcome.errors["productive"])
        table.add_row(str(number), _goodput(outcome), *beside, ", ".join(marks))
    return table


def _own_spares(found: Simulation) -> int:
    operation: Operation = found.chosen.operation
    return operation.spares


def say_spares(found: Simulation) -> str:
    """How many spares pay."""
    return f"  {found.best_spares} pay: the most work for each node that is held, spares included"


def say_faster(found: Simulation) -> str:
    """What a restart in half the time is worth."""
    operation = found.chosen.operation
    days = found.faster.gained * operation.nodes * found.devices_per_node * operation.seconds / DAY
    half = format_seconds(operation.restart_seconds / 2)
    return f"Restarted in {half} instead of twice that: {_say_gained(found.faster)} points, {days:,.0f} device-days"


def say_source(found: Simulation) -> str:
    """Whose failures they are, and how many runs were simulated."""
    model = found.failures
    rate = f"{model.per_1000_node_days:.2f} failures in 1000 node-days"
    if model.per_1000_days:
        rate += f" and {model.per_1000_days:.2f} of the whole cluster in 1000 days"
    if bursts := [part.name for part in model.components if part.burst_failures]:
        rate += f", in bursts those of {', '.join(bursts)}"
    return f"{rate} ({model.source}); {found.chosen.num_runs} runs simulated"
