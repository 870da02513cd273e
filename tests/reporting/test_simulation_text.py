"""A Simulation as text."""

from dataclasses import replace

from allranks.reporting.simulation_text import MEANINGS, render_simulation, say_error, say_interval, say_share
from allranks.simulation import CAUSES, DAY, Scope, Tier
from tests.reporting.simulations import outcome, simulation


def rows(text: str, begins: str) -> list[list[str]]:
    """The words of the rows that begin so, behind these."""
    return [line[len(begins) :].split() for line in text.splitlines() if line.startswith(begins)]


def test_the_answer_comes_first_and_every_figure_is_there() -> None:
    lines = render_simulation(simulation()).splitlines()

    assert lines[0] == "<b>tiny</b> on 10x8:h100: 80 devices for 10 days"
    assert lines[1].startswith("Goodput 90.0% (89.0 to 91.0)")
    assert lines[2] == (
        "  The mean of 50 runs, +-0.02 points; in brackets the middle 90%; every table is of the same 50"
    )
    assert lines[3] == "Interruptions 24 (20 to 30), one every 10 h 00 min"
    text = "\n".join(lines)
    for said in ("By formula 91.0% (somebody)", "a note, because of something", "somebody's log", "50 runs simulated"):
        assert said in text
    assert "+1.50 +-0.01 points, 12 device-days" in text
    assert max(map(len, lines)) <= 100


def test_best_and_ones_own_are_marked() -> None:
    text = render_simulation(simulation())

    assert rows(text, "10 min 00 s") == [["90.00%", "yours"]]
    assert rows(text, "5 min 00 s") == [["92.00%", "+2.00", "+-0.01", "best"]]
    assert ["90.00%", "10.00%", "75.00%", "best,", "yours"] in rows(text, "2 ")
    assert ["50.00%", "-40.00", "+-0.01", "50.00%", "50.00%"] in rows(text, "0 ")


def test_an_interval_longer_than_the_run_is_marked_as_ones_own_and_as_never_reached() -> None:
    own = outcome(every=40 * DAY)
    text = render_simulation(simulation(chosen=own, intervals=(outcome(0.92, every=300.0), own)))

    assert rows(text, "40 d 00 h") == [["90.00%", "yours,", "no", "save", "within", "the", "run"]]


def test_of_what_is_not_sure_a_digit_less_is_told() -> None:
    own = outcome(0.66, error=0.018)
    text = render_simulation(simulation(chosen=own, intervals=(own,), spares=(own,)))

    assert "+-1.80 points" in text
    assert rows(text, "productive") == [["66.0%", "528", *MEANINGS["productive"].split()]]
    assert rows(text, "10 min 00 s") == [["66.0%", "yours"]]
    assert rows(text, "2 ")[0] == ["66.0%", "34.0%", "55.0%", "best,", "yours"]
    assert [say_share(0.99824, error) for error in (0.00049, 0.0005)] == ["99.82%", "99.8%"]
    assert [say_error(error) for error in (0.0, 1e-9, 0.0001, 0.00011)] == ["+-0.00", "+-0.01", "+-0.01", "+-0.02"]


def test_one_run_says_that_nobody_knows_how_sure_it_is() -> None:
    one = replace(outcome(error=0.5), num_runs=1)
    other = replace(outcome(0.8999, every=300.0, error=0.5), num_runs=1, gained=-0.00001)
    text = render_simulation(simulation(chosen=one, intervals=(other, one), spares=(one,), faster=one))

    assert "how sure that is nobody can say" in text and "+-" not in text
    assert rows(text, "5 min 00 s") == [["90.0%", "+0.00", "best"]]


def test_without_a_formula_it_says_why() -> None:
    text = render_simulation(simulation(formula=None, formula_because="two tiers", young_seconds=None))

    assert "No formula beside it, because two tiers" in text
    assert "the shortest interval is the best" in text


def test_formulas_of_one_kind_of_copy_say_so_beside_two() -> None:
    memory, one = Tier("a peer", Scope.NODE, 60.0), simulation()
    operation = replace(one.chosen.operation, tiers=(memory, *one.chosen.operation.tiers))
    two = simulation(chosen=replace(one.chosen, operation=operation))
    texts = [say_interval(found) for found in (one, two)]
    assert [("know of one kind of copy alone" in text) for text in texts] == [False, True]
    assert all("Young 5 min 10 s, Daly 5 min 05 s" in text for text in texts)


def test_every_cause_has_a_meaning() -> None:
    assert set(MEANINGS) == set(CAUSES)
