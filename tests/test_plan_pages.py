"""The how-to pages of planning: every question of tuning ends in a command that answers it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.main import main
from tests.cli.test_surface import SURFACE
from tests.test_documentation import ROOT, blocks
from tools.plan_pages import CLUSTERS, FAMILIES, command, render_100b

PAGE = "docs/how-to/plan.md"
HUNDRED = "docs/how-to/plan-100b.md"

# Question -> what the answer has to have in it.
ANSWERS: dict[int, tuple[str, ...]] = {
    1: (r"peak memory +[\d.]+ GB \([\d.]+ GB to [\d.]+ GB\)", "What fills the memory"),
    2: (r"unit=2 +changes no", r"unit=8 +\+[\d.]+ [MG]B, "),
    3: (r"FITS: dp_shard=8, micro_batch \d", r"global_batch=128 +changes no memory, and speed by less"),
    4: (r"\(8.0B parameters, \d+ positions\)", r"positions are the most \(in steps of 1024\)"),
    5: (r"gpus=8 +\+[\d.]+ GB", r"gpus=32 +-[\d.]+ GB"),
    6: (
        r"optimizer +[\d.]+ GB",
        r"offload=parameters +-[\d.]+ GB, -\d+% speed, [\d.]+ GB\s+in each",
        r"sharding=optimizer +[+-][\d.]+ GB, [+-]\d+% speed",
    ),
    7: (
        r"FITS: (?!.*recompute=)",
        r"recompute=selective +-[\d.]+ [kMG]?B, -\d+% speed",
        r"recompute=full +[+-][\d.]+ [kMG]?B, [+-]\d+% speed",
    ),
    8: (r"recompute=selective +-[\d.]+ [MG]B, ", r"recompute=full +-[\d.]+ [MG]B, -\d+% speed"),
    9: (r"unit +parameters +gathered +kept +recompute=full", r"32 x layers"),
    10: (r"ddp_hook=bfloat16 +changes no memory, and speed by less than 0.5%",),
    11: (r"precision=float32 +\+[\d.]+ [MG]B, -\d+% speed", r"gather=float32 +\+[\d.]+ [MG]B"),
    12: (r"fsdp alone .*\n +fits\n", r"hsdp alone .*\n +(micro_batch \d+\n +)?\d+% slower"),
    13: (r"dp_shard=4 +\+[\d.]+ GB", r"dp_shard=2 +\+[\d.]+ GB"),
    14: (r"sharding=grad_op +\+[\d.]+ GB",),
    15: (r"kept most by\n +\d+ x layers", "scores|activation|norm"),
    16: (r"gathered +[\d.]+ GB", r"\d+ x .*\d GB"),
    17: (r"recompute=none +\+[\d.]+ GB, \+\d+% speed",),
}


def questions() -> dict[int, str]:
    """Question -> the only command below its heading."""
    parts = re.split(r"^### (\d+)\. ", (ROOT / PAGE).read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        (line,) = re.findall(r"^```bash\n\.venv/bin/(allranks plan .*)\n```\n*\Z", text, re.MULTILINE)
        found[int(number)] = line
    return found


def test_there_are_seventeen() -> None:
    assert list(questions()) == list(ANSWERS) == list(range(1, 18))


@pytest.mark.parametrize("number", ANSWERS)
def test_the_command_answers_its_question(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = questions()[number].replace("'", "").split()
    assert main(words[1:]) in (0, 1)
    said = capsys.readouterr().out
    for pattern in ANSWERS[number]:
        assert re.search(pattern, said), (pattern, said)


def answer(capsys: pytest.CaptureFixture[str], number: int, *more: str) -> dict[str, Any]:
    """What the command of a question says as JSON; what is given again, counts as it was given last."""
    words = questions()[number].replace("'", "").split()
    assert main([*words[1:], *more, "--json"]) in (0, 1)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_recomputation_is_taken_only_where_it_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """Question 7: left open, none is the fastest; each policy that recomputes more gives memory for speed."""
    found = answer(capsys, 7)
    assert "recompute" not in found["best"]["layout"] and found["best"]["fits"]
    changed = {change["change"]: change["estimate"] for change in found["what_ifs"]}
    policies = [found["best"], changed["recompute=selective"], changed["recompute=full"]]
    peaks, steps = ([one[key]["expected"] for one in policies] for key in ("peak_bytes", "step_seconds"))
    assert peaks == sorted(peaks, reverse=True) and steps == sorted(steps)


@pytest.mark.parametrize(
    ("fabric", "batch", "leads"),
    [("ethernet100", "64", "fsdp"), ("ethernet100", "1024", "fsdp"), ("10g", "1024", "hsdp")],
)
def test_whether_hsdp_makes_sense_depends_on_the_links(
    fabric: str, batch: str, leads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Question 12: the page's own cluster, and what its text says of slower links."""
    text = (ROOT / PAGE).read_text().partition("### 12. ")[2].partition("### 13. ")[0]
    assert "`fsdp` leads at 100 Gbit/s" in text and "and `hsdp` at 10 Gbit/s (`@10g`)" in text
    words = questions()[12].replace("@ethernet100", f"@{fabric}").split()
    assert f"4x8:a100-80g@{fabric}" in words
    assert main([*words[1:], "--global-batch", batch, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entries = [found["best"], *found["others"]]
    steps = {one["family"]: one["step_seconds"]["expected"] for one in entries if one.get("family") in ("fsdp", "hsdp")}
    assert min(steps, key=lambda family: steps[family]) == leads and len(steps) == 2


def test_the_unit_with_the_most_unsharded_memory_is_the_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Question 16: the column names the largest unit, and the whole has one of them at once at least."""
    words = questions()[16].split()
    assert main(words[1:]) == 0
    said = capsys.readouterr().out
    table = said[said.index("unit ") :]
    rows = re.findall(r"^  (?:\d+ x )?(\S+) +[\d.]+[kMB]? +([\d.]+) ([kMG]?B) ", table, re.MULTILINE)
    sizes = {unit: float(size) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[scale] for unit, size, scale in rows}
    assert len(sizes) == 3 and max(sizes, key=lambda unit: sizes[unit]) == "experts.*"
    gathered = re.search(r"^  gathered +([\d.]+) GB", said, re.MULTILINE)
    assert gathered is not None and float(gathered[1]) * 1e9 >= sizes["experts.*"]


def test_the_other_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = set(questions().values())
    lines = [line.removeprefix(".venv/bin/") for block in blocks(PAGE, "bash") for line in block.splitlines()]
    others = [line.replace("'", "").split()[1:] for line in lines if line not in asked and "task.py" not in line]
    ran = [words for words in others if words[0] == "plan"]
    assert len(ran) == 8
    for words in ran:
        assert main(words) in (0, 1), words


PAGES = (PAGE, HUNDRED, "docs/reference/plan.md", "docs/reference/plan-page.md", "docs/reference/planned-layouts.md")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_is_one(page: str) -> None:
    """In shell blocks and inside of sentences: of the command that the same words name, else of any."""
    known = {command.partition(" ")[2]: set(OPTION.findall(words)) for command, words in SURFACE.items()}
    every = set().union(*known.values())
    text = re.sub(r"^```(?!bash).*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    said = [
        *re.findall(r"`([^`\n]*--[a-z][^`\n]*)`", text),
        *(line for line in text.splitlines() if "/allranks " in line),
    ]
    assert said
    for words in said:
        named = re.search(r"allranks (plan|train|dryrun|report|doctor|verify|simulate)", words)
        options = set(OPTION.findall(words))
        assert options <= (known[named[1]] if named else every), words


def test_what_a_sentence_asks_for_is_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Question 6 names a layout in its text; it is one that fits, and moves the state."""
    (layout,) = set(re.findall(r"`--layout (auto,[^`]+)`", (ROOT / PAGE).read_text()))
    assert main(["plan", "gpt2", "--cluster", "2:a100-80g", "--global-batch", "8", "--layout", layout, "--json"]) == 0
    assert layout.partition(",")[2] in json.loads(capsys.readouterr().out)["best"]["layout"]


def test_the_page_of_100_billion_is_what_the_planner_says() -> None:
    assert (ROOT / HUNDRED).read_text() == render_100b()


@pytest.mark.parametrize("cluster", CLUSTERS.values())
def test_its_numbers_are_those_of_the_command(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(cluster).split()[1:]) == 0
    said = " ".join(capsys.readouterr().out.split())
    text = (ROOT / HUNDRED).read_text()
    section = text[text.index(command(cluster)) :].partition("\n## ")[0]
    best = re.search(r"What wins is `([^`]+)` with (\d+) sample", section)
    assert best is not None and f"FITS: {best[1]}, micro_batch {best[2]}" in said
    rows = re.findall(
        r"^\| ([^|]+) \| `([^`]+)`.*? \| (yes|no) \| ([^|]+) \| ([^|]+) \| (.*) \|$", section, re.MULTILINE
    )
    assert {title for title, *_ in rows} == {"**the best**", *FAMILIES.values()}
    for title, layout, _fits, _used, _step, why in rows[1:]:
        assert " ".join(f"{layout}".split()) in said.replace(" ", "") or layout in said, title
        assert why.replace(" ", "") in said.replace(" ", ""), title


def test_the_plain_strategies_lose_or_fail() -> None:
    """What the page is for: on 40 GB nothing plain fits; on 80 GB one does, which is what wins."""
    text = (ROOT / HUNDRED).read_text()
    small = text[text.index("A100 40 GB") :].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w[^|]+) \| `.*? \| (yes|no) \| ", small, re.MULTILINE)
    assert len(rows) == len(FAMILIES) and {fits for _, fits in rows} == {"no"}
    large = text[text.index("A100 80 GB") :].partition("\n## ")[0]
    steps = re.findall(r"^\| ([\w*][^|]+) \| `.*? \| (yes|no) \| [^|]+ \| (-|\d+ min \d+ s) \| ", large, re.MULTILINE)
    assert len(steps) == 1 + len(FAMILIES)
    seconds = {
        title: int(minutes) * 60 + int(rest)
        for title, fits, step in steps
        if fits == "yes"
        for minutes, rest in [step.removesuffix(" s").split(" min ")]
    }
    best = seconds.pop("**the best**")
    assert seconds == {"FSDP alone": best}
