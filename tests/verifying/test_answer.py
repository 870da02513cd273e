"""The answer in words and as JSON, and its exit code."""

from dataclasses import replace

from allranks.verifying.answer import Answer, cannot, largest_error
from allranks.verifying.findings import found
from allranks.verifying.recording import Part, RunRecord
from tests.verifying.records import evidence, scale


def test_the_three_answers() -> None:
    right = evidence()
    equal = Answer((), right.one, right.ranks, right.world)
    assert (equal.exit_code, equal.equal, equal.to_json()["equal"]) == (0, True, True)
    assert str(equal).splitlines()[0] == "equal: 2 processes compute what one device computes, over 2 steps"
    differs = Answer((found("S9", "every gradient differs", "by 2"),), right.one, right.ranks, right.world)
    assert (differs.exit_code, differs.equal) == (1, False)
    assert str(differs).splitlines()[1:3] == [
        "every gradient differs (S9: ranks weigh the same whatever they hold)",
        "  by 2",
    ]
    unknown = cannot("it fails", "line 3\nValueError", "mend it")
    assert (unknown.exit_code, unknown.equal, unknown.to_json()["equal"]) == (3, False, None)
    assert str(unknown) == "could not be verified: it fails\n  line 3\n  ValueError\n  next: mend it"


def test_what_was_shrunk_is_told_with_every_answer() -> None:
    right = evidence()
    given = {"one": right.one, "ranks": right.ranks, "world": right.world, "shrunk": "shrunk: 2 layers of 12"}
    differs = Answer((found("S9", "every gradient differs", "by 2"),), **given)  # type: ignore[arg-type]
    unknown = replace(cannot("it fails", "line 3", "mend it"), shrunk="shrunk: 2 layers of 12")
    for answer in (Answer((), **given), differs, unknown):  # type: ignore[arg-type]
        assert "\n  shrunk: 2 layers of 12" in str(answer)
        assert answer.to_json()["notes"][0] == "shrunk: 2 layers of 12"  # type: ignore[index]
    assert str(differs).splitlines()[2].startswith("every gradient differs")


def test_the_largest_error_is_told() -> None:
    right = evidence()
    assert largest_error(right.one, right.ranks, "gradients") == 0.0
    wrong = evidence(lambda ranks: scale(ranks[1].steps[1].gradients, 1.25, ["bias"]))
    assert largest_error(wrong.one, wrong.ranks, "gradients") == 0.25
    assert largest_error(right.one, right.ranks, "kept") is None


def test_the_error_of_tensors_that_are_cut_by_hand_is_told() -> None:
    def cut(ranks: list[RunRecord]) -> None:
        for rank, run in enumerate(ranks):
            for parameters in (run.start.parameters, *(step.parameters for step in run.steps)):
                part = parameters["weight"].value
                parameters["weight"] = Part(None, part[:1] if rank == 0 else part[1:])
        scale(ranks[1].steps[1].parameters, 1 + 2.0**-40, ["weight"])

    found = evidence(cut)
    told = str(Answer((), found.one, found.ranks, found.world))
    assert f"parameters: equal to {2.0**-40:.2g} of each tensor's largest value" in told
