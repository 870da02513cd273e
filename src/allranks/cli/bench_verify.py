"""`allranks bench verify`: how well verify does on programs of which it is known what is wrong with them."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allranks.cli.output import print_json, stdout_kept_free
from allranks.errors import ConfigError
from allranks.units import format_seconds

if TYPE_CHECKING:
    from allranks.request import TrainRequest
    from allranks.verifying.answer import Answer
    from allranks.verifying.score import Result, Score
    from allranks.verifying.watched import Watched

RECORD = Path(".cache/bench-verify.jsonl")
IMPERFECT = 1


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of programs: Sxx_name.py beside their clean twins.")
    ] = Path("corpus"),
    kinds: Annotated[
        str, typer.Option(metavar="S05,S12", help="Only programs of these kinds; `clean` is one.", show_default=False)
    ] = "",
    part: Annotated[str, typer.Option(metavar="i/n", help="Every n-th program, from the i-th on.")] = "1/1",
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Where results are kept, else in {RECORD}: what is known of this source is not run again.",
        ),
    ] = None,
    sentinels: Annotated[
        bool,
        typer.Option(
            "--sentinels",
            help="Train the Tasks among them instead: which sentinel catches what, when, and what it costs.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Verify every program of a folder, and count what is caught, named rightly and accused falsely.

    Exit code 0: every wrong program is caught and no clean one accused; 1: not so; 2: refused.
    """
    if sentinels:
        if record is not None:
            raise ConfigError(
                "--record keeps what verify says, and --sentinels trains all again: leave one of them out"
            )
        return _watch(folder, kinds, part, json=json)
    with stdout_kept_free(json):
        from allranks.verifying.corpus import part_of, read_corpus, read_kinds
        from allranks.verifying.score import by_kind, score
        from allranks.verifying.scoring import Record, document_of, run_all

        entries = part_of(read_corpus(folder, read_kinds(kinds)), part)
        found, num_known, machine = [], 0, _describe_machine() if json else {}
        for result, known in run_all(entries, Record(record or RECORD), _verify):
            found.append(result)
            num_known += known
            print(_line(result, known), file=sys.stderr, flush=True)
    results = sorted(found, key=by_kind)
    total = score(results)
    if json:
        print_json(document_of(results, total, _with_load_after(machine), num_known))
    else:
        print_results(results, total)
    return 0 if total.perfect else IMPERFECT


def _watch(folder: Path, kinds: str, part: str, *, json: bool) -> int:
    """Score the sentinels."""
    with stdout_kept_free(json):
        from allranks.verifying.corpus import part_of, read_corpus, read_kinds
        from allranks.verifying.watched import count, watch_all

        found, machine = [], _describe_machine() if json else {}
        for one in watch_all(part_of(read_corpus(folder, read_kinds(kinds)), part)):
            found.append(one)
            print(f"{one.name} {one.run}: {one.outcome} ({format_seconds(one.seconds)})", file=sys.stderr, flush=True)
    totals = count(found)
    if json:
        rows = [one.to_json() for one in found]
        print_json({"machine": _with_load_after(machine), "score": totals, "results": rows})
    else:
        _print_table(
            [_watched_cells(one) for one in found],
            [", ".join(f"{name}: {number}" for name, number in totals.items())],
            ("program", "run", "outcome", "sentinels", "kinds named", "cost", "time"),
        )
    return IMPERFECT if totals["missed"] or totals["false alarm"] or totals["failed"] else 0


def _describe_machine() -> dict[str, object]:
    from allranks.benchmarking.machine import describe_machine  # torch, which what is known needs not

    return describe_machine("cpu")


def _with_load_after(machine: dict[str, object]) -> dict[str, object]:
    from allranks.benchmarking.machine import machine_load

    return machine | {"load_after": machine_load()}


def _watched_cells(one: "Watched") -> tuple[str, ...]:
    caught = f"{' '.join(one.sentinels)}, step {one.step}" if one.sentinels else ""
    kinds = " ".join(one.kinds) + (" (not it)" if one.outcome == "caught" and not one.named else "")
    cost = "" if one.cost is None else f"{one.cost:.2%}"
    said = one.said if one.outcome == "not watched" else caught
    return one.name, one.run, one.outcome, said, kinds, cost, format_seconds(one.seconds) if one.seconds else ""


def _verify(request: "TrainRequest", steps: int) -> "Answer":
    from allranks.verifying.command import verify_request  # torch, which what is known needs not

    return verify_request(request, steps)


def _line(result: "Result", known: bool) -> str:
    how = "known" if known else format_seconds(result.seconds)
    return f"{result.name} {result.run}: {result.outcome} {' '.join(result.kinds)} ({how})"


def print_results(results: "Sequence[Result]", total: "Score") -> None:
    """One row a run, and the counts below."""
    rows = [
        (
            result.name,
            result.run,
            result.outcome,
            " ".join(result.kinds) + ("" if result.named_first or not result.named else " (not first)"),
            format_seconds(result.seconds),
        )
        for result in results
    ]
    _print_table(rows, describe(total))


def _print_table(
    rows: Sequence[tuple[str, ...]],
    lines: Sequence[str],
    headings: Sequence[str] = ("program", "run", "outcome", "findings", "time"),
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("cost", "time") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it has to be: what is cut cannot be read, and is not found by grep.
    console = Console(file=sys.stdout, width=240, highlight=False)
    console.print(table)
    for line in lines:
        console.print(line)


def describe(total: "Score") -> list[str]:
    """The counts in words."""
    return [
        f"caught: {total.caught} of {total.wrong} wrong programs ({total.refused} of them refused for it), "
        f"{total.kinds_caught} of {total.kinds} kinds whole",
        f"named rightly: {total.named_first} by the first finding, {total.named} by any",
        f"false alarms: {total.false_alarms} of {total.clean} runs of clean programs",
        f"not verified: {total.unverified}; not to be seen on one machine: {total.unseen}",
    ]
