"""How near the planner comes to published runs; fits nothing.

    python bench/plan_accuracy.py FILE [FILE ...] [--json] [--rows]

FILE is of the schema of bench/data/published-runs.json. Prints for each source and in all: rows, mean and median error
of the step time, mean error of memory, rows that ran out of memory, those of them that were called a fit, rows of the
others that were called unfit, mean regret of taking the configuration that is predicted to be the fastest of those that
were compared, how many published times lie in the 90% interval, and the interval's median high/low. `--rows` prints
predicted beside published for every row. Then the same regret beside Calculon's and a rule of thumb's, where Calculon
was run (rivals.py). The last lines scale: with one factor for each device and framework, fitted to rows of quality A
and B, and how far finer factors would bring the largest source. Which rows calibration used says calibration_rows.py;
fit_constants.py used no others.
"""

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibration_rows import DATA, FITTED, is_calibration
from judged import Judged, Skipped, judge_all
from published_models import Row, precision_of
from published_runs import rows_of, states_recompute
from rivals import CHOOSERS, compare_choosers, regrets_of

GIB = float(2**30)
NAMED = 5
"""Skipped rows of each reason whose names are printed; `--json` has them all."""


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """The figures of one source, or of all; None where no row gives what a figure needs."""
    timed = [one for one in judged if one.published_seconds]
    weighed = [one for one in judged if one.published_bytes]
    ran = [one for one in judged if not one.ran_out]
    errors = [abs(one.error) for one in timed]
    regrets = regrets_of(judged)
    widths = [one.cost.step_seconds.high / one.cost.step_seconds.low for one in timed]
    return {
        "rows": len(judged),
        "step_mape": statistics.fmean(errors) if errors else None,
        "step_median": statistics.median(errors) if errors else None,
        "memory_mape": statistics.fmean(abs(one.memory_error) for one in weighed) if weighed else None,
        "memory_rows": len(weighed),
        "false_fits": sum(one.ran_out and one.fits for one in judged),
        "false_fit_rows": [one.row["id"] for one in judged if one.ran_out and one.fits],
        "out_of_memory": len(judged) - len(ran),
        "false_refusals": sum(not one.fits for one in ran),
        "false_refusal_rows": [one.row["id"] for one in ran if not one.fits],
        "mean_regret": statistics.fmean(regrets) if regrets else None,
        "groups": len(regrets),
        "coverage": statistics.fmean(one.covered for one in timed) if timed else None,
        "interval_width": statistics.median(widths) if widths else None,
    }


def by_source(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """In the order of the file."""
    sources: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        sources[one.row["source"]].append(one)
    return sources


def device_and_framework(row: Row) -> tuple[Any, ...]:
    """Whose one factor the goal allows."""
    return row["hardware"]["gpu"], row["framework"]


def scaled(judged: Sequence[Judged], key: Callable[[Row], object] = device_and_framework) -> float | None:
    """Mean error of the step time once all rows of one `key` have a factor of their own: the median of their errors.

    Nothing is fitted to rows of quality C: they are judged with the factor of the others, or as they are.
    """
    groups: dict[object, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.published_seconds:
            groups[key(one.row)].append(one)
    errors = []
    for group in groups.values():
        trusted = [1 + one.error for one in group if one.row["quality"] != "C"]
        factor = statistics.median(trusted) if trusted else 1.0
        errors += [abs((1 + one.error) / factor - 1) for one in group]
    return statistics.fmean(errors) if errors else None


FACTORS: dict[str, Callable[[Row], object]] = {
    "all": lambda row: None,
    "hidden size and tp": lambda row: (row["model"]["hidden"], row["parallel"]["tp"]),
    "hidden size, tp and micro-batch": lambda row: (
        row["model"]["hidden"], row["parallel"]["tp"], row["parallel"].get("mbs"),
    ),
}  # fmt: skip
"""How finely the largest source is scaled: what the first leaves over the last, constants for more things would mend;
what the last leaves, no factor."""


def is_stated(row: Row) -> bool:
    """Whether a row computes in 16 bits and its source states micro-batch, recompute and schedule."""
    parallel = row["parallel"]
    scheduled = parallel["pp"] == 1 or parallel.get("schedule")
    return bool(precision_of(row) == "bfloat16" and parallel.get("mbs") and states_recompute(row) and scheduled)


SUBSETS: dict[str, Callable[[Row], bool]] = {
    "stated": is_stated,
    "calibration": is_calibration,
    "held_out": lambda row: not is_calibration(row),
    "held_out_stated": lambda row: is_stated(row) and not is_calibration(row),
    "stated_a_b": lambda row: is_stated(row) and row["quality"] != "C",
    "held_out_sources": lambda row: row["source"] not in FITTED,
    "quality_c": lambda row: row.get("quality") == "C",
}
"""Parts of all rows: 16 bits with micro-batch, recompute and schedule stated; rows that constants were fitted to, and
that they were not; stated ones without those of quality C; sources of which they have seen none; what the table's
compiler calls suspicious."""


def report_on(judged: Sequence[Judged], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Everything that this program prints, as data; `skipped` rows are counted by reason, and named."""
    parts = {name: [one for one in judged if chosen(one.row)] for name, chosen in SUBSETS.items()}
    sources = by_source(judged)
    largest = max(sources, key=lambda name: len(sources[name]), default="")
    return {
        "sources": {name: summary(rows) for name, rows in sources.items()},
        "largest": {"name": largest, **{n: scaled(sources.get(largest, []), key) for n, key in FACTORS.items()}},
        "all": summary(judged),
        "regrets": compare_choosers(sources),
        "skipped": len(skipped),
        "skipped_because": dict(Counter(one.because for one in skipped).most_common()),
        "skipped_rows": {one.name: one.because for one in skipped},
        "subsets": {name: {**summary(rows), "step_mape_scaled": scaled(rows)} for name, rows in parts.items()},
    }


def read_rows(file: Path) -> list[Any]:
    """The rows of a file; ends the program with one line where it is no file of the schema."""
    try:
        return list(rows_of(json.loads(file.read_text())))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} cannot be read: {error}") from None
    except (LookupError, TypeError, AttributeError):
        raise SystemExit(f"{file} is not of the schema of {DATA.name}: an object with a list of rows") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="the tables of docs/explanation/planner-accuracy.md")
    arguments = parser.parse_args()
    judged, skipped = judge_all(row for file in arguments.files for row in read_rows(file))
    report = report_on(judged, skipped)
    if arguments.json:
        print(json.dumps(report, indent=1))
    elif arguments.markdown:
        print("\n".join(markdown(report, judged)))
    else:
        print("\n".join(text(report)))
        if arguments.rows:
            print("\n".join(" ".join(cells(one)) for one in judged))
    return 0


HEADS = {
    "rows": "rows",
    "step_mape": "step",
    "step_median": "median",
    "memory_mape": "memory",
    "out_of_memory": "ran out",
    "false_fits": "false fits",
    "false_refusals": "false refusals",
    "mean_regret": "regret",
    "coverage": "coverage",
    "interval_width": "high/low",
}


def text(report: Mapping[str, Any]) -> list[str]:
    """One line a source."""
    lines = [f"{'source':<24}" + "".join(f"{head:>15}" for head in HEADS.values())]
    for name, figures in lines_of(report):
        lines.append(f"{name:<24}" + "".join(f"{cell(head, figures[head]):>15}" for head in HEADS))
    scaled_error, without_c = (
        cell("step_mape", report["subsets"][name]["step_mape_scaled"]) for name in ("stated", "stated_a_b")
    )
    for name, found in report["regrets"].items():
        each = ", ".join(f"{chooser} {found[chooser]:.1%}" for chooser in CHOOSERS)
        lines.append(f"regret in the {found['groups']} groups of {name} that Calculon predicted: {each}")
    lines.append(f"{report['skipped']} rows are skipped" + (", because" if report["skipped"] else ""))
    for because, count in report["skipped_because"].items():
        named = [name for name, why in report["skipped_rows"].items() if why == because]
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        lines.append(f"  {count:>5} {because}: {', '.join(named[:NAMED])}{more}")
    lines.append(
        f"stated, with one factor for each device and framework: step {scaled_error}; {without_c} without quality C"
    )
    largest = report["largest"]
    factors = "; for each ".join(f"{name} {cell('step_mape', largest[name])}" for name in FACTORS)
    lines.append(f"{largest['name']}, with one factor for {factors}")
    return lines


def lines_of(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Sources, all, then the subsets that have rows."""
    subsets = [(name, figures) for name, figures in report["subsets"].items() if figures["rows"]]
    return [*report["sources"].items(), ("all", report["all"]), *subsets]


def cell(name: str, value: float | None) -> str:
    """As a table shows it."""
    if value is None:
        return "-"
    if name in ("rows", "out_of_memory", "false_fits", "false_refusals"):
        return str(value)
    return f"{value:.2f}" if name == "interval_width" else f"{value:.1%}"


def cells(one: Judged) -> list[str]:
    """A row's name, what was published, what is predicted (and Calculon's prediction), and the same of memory."""
    calculon = one.row.get("calculon_pred_s")
    published, weighed = one.published_seconds, one.published_bytes
    return [
        one.row["id"],
        f"{published:.4g}" if published else "out of memory" if one.ran_out else "-",
        f"{one.seconds:.4g}",
        f"{one.error:+.1%}" if published else "-",
        f"{calculon:.4g}" if calculon else "-",
        f"{weighed / GIB:.1f}" if weighed else "-",
        f"{one.predicted_bytes / GIB:.1f}",
        "yes" if one.fits else "no",
        "yes" if is_calibration(one.row) else "no",
    ]


def markdown(report: Mapping[str, Any], judged: Sequence[Judged]) -> list[str]:
    """The page's tables: one line a source, then one line a row."""
    lines = ["## By source", "", "| | " + " | ".join(HEADS.values()) + " |", "|---" * (len(HEADS) + 1) + "|"]
    for name, figures in lines_of(report):
        lines.append(f"| {name} | " + " | ".join(cell(head, figures[head]) for head in HEADS) + " |")
    lines += ["", "## Which is the fastest", ""]
    lines += ["| regret | groups | " + " | ".join(CHOOSERS) + " |", "|---" * (len(CHOOSERS) + 2) + "|"]
    for name, found in report["regrets"].items():
        lines.append(f"| {name} | {found['groups']} | " + " | ".join(f"{found[who]:.1%}" for who in CHOOSERS) + " |")
    lines += ["", "## Not estimated", "", "| skipped row | because |", "|---|---|"]
    lines += [f"| {name} | {because} |" for name, because in report["skipped_rows"].items()]
    heads = (
        "row",
        "published s",
        "predicted s",
        "error",
        "Calculon s",
        "published GiB",
        "predicted GiB",
        "fits",
        "fitted",
    )
    lines += ["", "## Row by row", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return lines + [f"| {' | '.join(cells(one))} |" for one in judged]


if __name__ == "__main__":
    raise SystemExit(main())
