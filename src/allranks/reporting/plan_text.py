"""A Plan as text, for a terminal of 100 columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from allranks.plan import Bill, Choice, Estimate, Plan, Ranked, Span
from allranks.reporting.as_text import as_text, breakable
from allranks.units import format_bytes, format_count, format_seconds

WIDTH = 100
SPARE = "allocator's spare"
SHOWN_REFUSALS = 8
BAR_CELLS = 24


def render_plan(plan: Plan, *, width: int = WIDTH) -> str:
    """The whole plan, verdict first, at most `width` columns wide."""
    leading = plan.leading
    parts: list[RenderableType] = [_headline(plan), _verdict(plan)]
    if leading is not None:
        parts += [_figures(leading.estimate), *_where_it_goes(leading.estimate)]
    for title, body in (
        ("Checked by dry runs", _checked(plan)),
        ("For all of it", _bill(plan.bill)),
        ("Why not the others", _others([one for one in plan.others if one.family or one.estimate.fits])),
        ("What if (one change each)", _pairs((change.change, change.because) for change in plan.what_ifs)),
        ("Refused", _refusals(plan)),
        ("Decided for you", _bullets(plan.notes)),
    ):
        if body is not None:
            parts += [Text(), Text(title), body]
    return as_text(parts, width)


def render_comparison(plans: Sequence[Plan], *, width: int = WIDTH) -> str:
    """Several clusters, one row each, the most tokens per second first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("cluster", "left"), ("samples/s", "right"), ("step", "right"), ("peak", "right")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    priced = any(plan.bill is not None and plan.bill.money is not None for plan in plans)
    for heading in ("mfu", *(["money"] if priced else [])):
        table.add_column(heading, justify="right")
    table.add_column("layout", overflow="fold")
    for plan in sorted(plans, key=_pace, reverse=True):
        table.add_row(*_comparison_row(plan, priced))
    return as_text([Text("Compared"), table], width)


def _samples(a_second: float) -> str:
    return format_count(a_second) if a_second >= 1000 else f"{a_second:.3g}"


def _pace(plan: Plan) -> float:
    return plan.best.estimate.samples_per_second if plan.best else 0.0


def _comparison_row(plan: Plan, priced: bool) -> list[str | Text]:
    leading = plan.leading
    if leading is None:
        return [plan.cluster, *["-"] * (5 if priced else 4), "every layout is refused"]
    found = leading.estimate
    bill = plan.bill
    money = "-" if bill is None or bill.money is None else f"{bill.money.expected:,.0f} {bill.currency}"
    fits = "" if plan.best else " (does not fit)"
    figures = [_samples(found.samples_per_second), format_seconds(found.step_seconds.expected)]
    figures += [format_bytes(found.peak_bytes.expected), f"{found.mfu:.0%}", *([money] if priced else [])]
    return [plan.cluster, *figures, breakable(_choice(found.choice) + fits)]


def _headline(plan: Plan) -> Text:
    seq = f", {plan.seq} positions" if plan.seq else ""
    devices = f"{plan.num_devices} device{'' if plan.num_devices == 1 else 's'}"
    size = f"{format_count(plan.parameters)} parameters{seq}"
    return Text(f"{plan.model} ({size}) on {plan.cluster} ({devices})", overflow="fold")


def _verdict(plan: Plan) -> Text:
    if plan.leading is None:
        return Text("REFUSED: no layout is left", overflow="fold")
    choice = _choice(plan.leading.estimate.choice)
    if plan.best is None:
        without = " without offload" if plan.offloaded else ""
        lines = [f"DOES NOT FIT{without}: the closest is {choice}", f"  {plan.leading.because}"]
        if plan.offloaded is not None:
            fits = "MAY FIT" if plan.offloaded.estimate.host_capacity_bytes is None else "FITS"
            lines += [f"{fits} WITH OFFLOAD: {_choice(plan.offloaded.estimate.choice)}", f"  {plan.offloaded.because}"]
        return breakable("\n".join(lines))
    unmet = "".join(f"\n  NOT WITHIN THE LIMIT: {line}" for line in plan.unmet)
    return breakable(f"FITS: {choice}\n  {plan.leading.because}{unmet}")


def _choice(choice: Choice) -> str:
    context = f" context={choice.layout.context}" if choice.layout.cp > 1 else ""
    return f"{choice.layout}{context}, micro_batch {choice.micro_batch}"


def _figures(found: Estimate) -> RenderableType:
    choice, seconds, peak = found.choice, found.step_seconds, found.peak_bytes
    forwards = f"{choice.micro_steps} forward{'' if choice.micro_steps == 1 else 's'} a step"
    spread = f"({format_seconds(seconds.low)} to {format_seconds(seconds.high)})"
    pace = f"{_samples(found.samples_per_second)} samples/s"
    if found.tokens_per_second > found.samples_per_second:
        pace += f", {format_count(found.tokens_per_second)} tokens/s"
    memory = f"({format_bytes(peak.low)} to {format_bytes(peak.high)}) of {format_bytes(found.capacity_bytes)}"
    rows = [
        ("step", f"{format_seconds(seconds.expected)} {spread}, {pace}, mfu {found.mfu:.0%}"),
        ("peak memory", f"{format_bytes(peak.expected)} {memory} on the fullest device"),
        *_stages(found),
        ("batch", f"{choice.global_batch} samples a step, {forwards} on each data-parallel rank; {choice.precision}"),
    ]
    return _pairs(rows) or Text()


def _where_it_goes(found: Estimate) -> list[RenderableType]:
    seconds = {name: value for name, value in asdict(found.time).items() if value > 0}
    sizes = {name: value for name, value in asdict(found.memory).items() if value > 0}
    if (spare := spare_bytes(found)) > 0:
        sizes[SPARE] = spare
    return [
        *(Text(), Text("Where the step goes"), _bars(seconds, {k: format_seconds(v) for k, v in seconds.items()})),
        *(Text(), Text("What fills the memory"), _bars(sizes, {k: format_bytes(v) for k, v in sizes.items()})),
    ]


def spare_bytes(found: Estimate) -> float:
    """Of the expected peak of the fullest rank what the allocator holds beyond what is in use."""
    return max(0.0, found.peak_bytes.expected - found.memory.total)


def _bars(values: Mapping[str, float], written: Mapping[str, str]) -> RenderableType:
    total = sum(values.values()) or 1.0
    table = _grid()
    for name, value in sorted(values.items(), key=lambda pair: -pair[1]):
        share = value / total
        cells = (Text(written[name], justify="right"), Text(f"{share:.0%}", justify="right"))
        table.add_row(Text(f"  {name}"), *cells, Text("━" * round(BAR_CELLS * share)))
    return table


def _checked(plan: Plan) -> RenderableType | None:
    """What each dry run said, and whether another layout leads now."""
    if not plan.checked:
        return None
    rows: list[tuple[str, str]] = [
        (one.outcome, f"{_choice(one.planned.choice)}\n{one.because}") for one in plan.checked
    ]
    rows.append(("so", _consequence(plan, plan.checked[0].planned)))
    return _pairs(rows)


def _consequence(plan: Plan, first: Estimate) -> str:
    """Whether what was planned `first` still leads, or fits now, and whether a dry run has seen what leads."""
    if plan.leading is None:
        return "nothing is left"
    leading = plan.leading.estimate.choice
    stays, name = leading == first.choice, _choice(leading)
    if plan.best is None and first.fits:
        said = f"nothing fits any more, and {name} is the closest"
    elif plan.best is None:
        said = "the closest does not fit" if stays else f"{name} is closer, and does not fit"
    elif stays:
        said = "the plan's best stays" if first.fits else "what came closest fits"
    else:
        said = f"{name} leads in its place"
    seen = any(one.corrected and one.planned.choice == leading for one in plan.checked)
    return said if seen else f"{said}, and no dry run has seen it"


def _bill(bill: Bill | None) -> RenderableType | None:
    if bill is None:
        return None
    spread = f"({format_seconds(bill.seconds.low)} to {format_seconds(bill.seconds.high)})"
    rows = [
        ("tokens", f"{format_count(bill.tokens)} in {bill.steps:,} steps"),
        (
            "time",
            f"{format_seconds(bill.seconds.expected)} {spread} without failures; {bill.device_hours:,.0f} device h",
        ),
    ]
    if bill.money is not None:
        rows.append(("money", _spanned(bill.money, bill.currency)))
    if bill.kilowatt_hours is not None:
        rows.append(("energy", _spanned(bill.kilowatt_hours, "kWh")))
    return _pairs([*rows, ("prices", bill.because)])


def _stages(found: Estimate) -> list[tuple[str, str]]:
    """What is in use on the first, the middle and the last stage, and on those of every other kind."""
    if found.choice.layout.pp == 1:
        return []
    told = (f"{format_bytes(use.total)} on stage {stage}" for stage, use in sorted(found.stages.items()))
    return [("in use", ", ".join(told))]


def _spanned(span: Span, unit: str) -> str:
    return f"{span.expected:,.0f} {unit} ({span.low:,.0f} to {span.high:,.0f})"


def _others(others: Sequence[Ranked]) -> RenderableType | None:
    if not others:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "step", "peak", "mfu"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    table.add_column("layout, and why not", overflow="fold")
    for other in others:
        found = other.estimate
        name = f"  {other.family} alone" if other.family else "  next"
        figures = (format_seconds(found.step_seconds.expected), format_bytes(found.peak_bytes.expected))
        table.add_row(name, *figures, f"{found.mfu:.0%}", breakable(f"{_choice(found.choice)}\n{other.because}"))
    return table


def _refusals(plan: Plan) -> RenderableType | None:
    shown = [(f"{refusal.rule}: {refusal.layout}", refusal.because) for refusal in plan.refusals[:SHOWN_REFUSALS]]
    more = len(plan.refusals) - len(shown)
    if more > 0:
        shown.append((f"and {more} more", "--json has them all"))
    return _pairs(shown)


def _pairs(rows: Iterable[tuple[str, str]]) -> RenderableType | None:
    table, count = _grid(), 0
    for name, value in rows:
        table.add_row(Padding(breakable(name), (0, 0, 0, 2)), breakable(value))
        count += 1
    return table if count else None


def _bullets(lines: Iterable[str]) -> RenderableType | None:
    table, count = _grid(1), 0
    for line in lines:
        table.add_row(Text("  -"), breakable(line))
        count += 1
    return table if count else None


def _grid(gap: int = 2) -> Table:
    return Table.grid(padding=(0, gap, 0, 0))
