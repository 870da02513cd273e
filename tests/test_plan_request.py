"""PlanRequest: the options, tidied."""

from pathlib import Path

from allranks.plan_request import PlanRequest


def test_lists_become_tuples_and_sizes_go_together() -> None:
    options = {
        "arguments": ["gpt2"],
        "cluster": ["local", "4:h100"],
        "seq": None,
        "layers": 2,
        "heads": None,
        "json": True,
    }
    found = PlanRequest.of({**options, "save": Path("x")})
    assert found == PlanRequest(("gpt2",), ("local", "4:h100"), {"layers": 2}, json=True, save=Path("x"))


def test_nothing_given_is_the_default() -> None:
    assert PlanRequest.of({"arguments": None, "cluster": None}) == PlanRequest()
