"""`allranks simulate` as users type it."""

import json
from pathlib import Path

import pytest

from allranks.cli.main import main

SMALL = ("--cluster", "64x8:h100", "--days", "10", "--runs", "20")


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def test_a_named_model_is_planned_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    text = simulate(capsys, "llama3-70b", *SMALL)

    assert text.startswith("llama3-70b on 64x8:h100: 512 devices for 10 days\nGoodput ")
    assert max(map(len, text.splitlines())) <= 100
    for said in ("a step takes", "because the plan says so", "Daly's formula says so", "Spare nodes", "Restarted in"):
        assert said in " ".join(text.split()), "lines may end anywhere"


def test_the_published_run_of_llama_3_is_met_with_what_the_how_to_says(capsys: pytest.CaptureFixture[str]) -> None:
    """arXiv 2407.21783: 419 unexpected interruptions in 54 days, more than 90% effective; here saves cost something."""
    found = json.loads(simulate(capsys, "llama3-405b", "--cluster", "2048x8:h100", "--days", "54", "--json"))["chosen"]
    assert found["interruptions"]["low"] <= 419 <= found["interruptions"]["high"]
    assert found["goodput"]["low"] >= 0.90


def test_the_document_holds_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(simulate(capsys, "llama3-8b", *SMALL, "--every", "20min", "--json"))

    operation = found["chosen"]["operation"]
    assert operation["nodes"] == 64
    assert operation["tiers"][-1]["survives"] == "cluster"
    assert operation["tiers"][-1]["every_seconds"] == pytest.approx(1200, abs=20)
    assert 0 < found["chosen"]["goodput"]["mean"] <= 1
    assert sum(found["chosen"]["shares"].values()) == pytest.approx(1)


def test_without_a_model_the_user_gives_step_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--step",
        "10s",
        "--save-cost",
        "30s",
        "--every",
        "1h",
        "--failures",
        "rsc-1",
        "--spares",
        "9",
        "--elastic",
    )
    found = json.loads(simulate(capsys, *SMALL, *words, "--peer-every", "1min", "--json"))

    operation = found["chosen"]["operation"]
    assert [tier["name"] for tier in operation["tiers"]] == ["peer's memory", "storage"]
    assert (operation["spares"], operation["elastic_nodes"]) == (9, 1)
    assert found["daly_seconds"] > 0


def test_the_page_stands_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    simulate(capsys, *SMALL, "--html", str(path))

    assert "Where the rest of the time goes" in path.read_text()
    assert "http://" not in path.read_text().split("</script>")[-1]


def test_where_nothing_fails_no_formula_has_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--failures", "0", "--step", "10s", "--save-cost", "30s", "--runs", "4")
    assert main(["simulate", *SMALL, *words]) == 0
    assert "Nothing fails: no save is needed" in capsys.readouterr().out
    assert main(["simulate", *SMALL, *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["young_seconds"] is None and document["daly_seconds"] is None


def test_the_own_setting_has_one_goodput_in_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    """With --every beyond the run, too, which no row stood for."""
    words = ("--cluster", "8x8:h100", "--days", "30", "--every", "40d", "--step", "10s", "--save-cost", "1s")
    lines = simulate(capsys, *words).splitlines()
    (productive,) = (line.split()[1] for line in lines if line.startswith("productive"))
    yours = [line for line in lines if "yours" in line.split(",")[-1] or ", no save" in line]

    assert lines[1].startswith(f"Goodput {productive} (")
    assert [line.startswith("40 d 00 h") for line in yours if productive in line] == [True, False]
    (own,) = (line for line in lines if line.startswith("40 d 00 h"))
    assert own.endswith("yours, no save within the run")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--days", "0"), "--days 0: more than 0 and at most 3650"),
        (("--failures", "rsc1"), "did you mean rsc-1"),
        (("--restart", "soon"), "--restart soon: not understood"),
        (("--seed", "-1"), "--seed -1: a seed is a whole number from 0"),
        (("--runs", "1000000"), "take --runs"),
        (("--failures", "100000", "--days", "3650"), "take fewer --days"),
        (("--detect", "1e400s"), "--detect 1e400s: more than 1e+18"),
        (("--layout", "tp=8"), "--layout belongs to a model"),
        (("--peer-every", "0"), "--peer-every 0: takes more than no time"),
        (("llama3-405b", "--layout", "ddp"), "does not run on 64x8:h100"),
        (("llama3-8b", "--storage", "1e-9"), "--storage 1e-09: to write a checkpoint takes"),
        (
            ("--save-cost", "11d"),
            "--save-cost 11d: a save takes 11 d 00 h, longer than the run of 10 d 00 h: give less",
        ),
        (("llama3-40b",), "llama3-405b"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["simulate", *SMALL, *words]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert says in told.err
