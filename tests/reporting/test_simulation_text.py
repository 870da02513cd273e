"""A Simulation as text."""

from allranks.reporting.simulation_text import MEANINGS, render_simulation
from allranks.simulation import CAUSES
from tests.reporting.simulations import simulation


def test_the_answer_comes_first_and_every_figure_is_there() -> None:
    lines = render_simulation(simulation()).splitlines()

    assert lines[0] == "<b>tiny</b> on 10x8:h100: 80 devices for 10 days"
    assert lines[1].startswith("Goodput 90.0% (89.0 to 91.0)")
    assert lines[2] == "Interruptions 24 (20 to 30), one every 10 h 00 min"
    text = "\n".join(lines)
    for said in ("By formula 91.0% (somebody)", "a note, because of something", "somebody's log", "50 runs simulated"):
        assert said in text
    assert "+1.50 points, 12 device-days" in text
    assert max(map(len, lines)) <= 100


def test_best_and_ones_own_are_marked() -> None:
    text = render_simulation(simulation())

    assert [line.split()[-1] for line in text.splitlines() if line.startswith("10 min 00 s")] == ["yours"]
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("5 min 00 s")] == ["best"]
    assert any(line.split() == ["2", "90.00%", "10.00%", "75.00%", "best,", "yours"] for line in text.splitlines())


def test_without_a_formula_it_says_why() -> None:
    text = render_simulation(simulation(formula=None, formula_because="two tiers", young_seconds=None))

    assert "No formula beside it, because two tiers" in text
    assert "the shortest interval is the best" in text


def test_every_cause_has_a_meaning() -> None:
    assert set(MEANINGS) == set(CAUSES)
