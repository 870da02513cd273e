"""The answer in words and as JSON, and its exit code."""

from dataclasses import replace
from typing import Any

import torch

from allranks.verifying.answer import ALONE_SHOW, BESIDE, Answer, cannot, equal_steps, largest_errors
from allranks.verifying.findings import found
from allranks.verifying.judge import judge
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


def test_what_is_equal_is_told_where_something_differs() -> None:
    """Up to the step in which it differs."""
    wrong = evidence(lambda ranks: scale(ranks[1].steps[1].raw, 1.25, ["bias"]))
    answer = Answer(tuple(judge(wrong)), wrong.one, wrong.ranks, wrong.world, notes=("dropouts are off",),
                    equal_steps=equal_steps(wrong))  # fmt: skip
    of_each = "to 0 of each tensor's largest value"
    lines = [
        "dropouts are off",
        f"gradients before clipping: equal in the first step {of_each}",
        *(f"{what}: equal {of_each}" for what in ("gradients", "parameters", "buffers")),
    ]
    assert str(answer).splitlines()[-6:] == [BESIDE, *(f"  {line}" for line in lines)]
    assert answer.to_json()["notes"] == lines
    nowhere = evidence(lambda ranks: scale(ranks[1].steps[0].raw, 1.25, ["bias"]))
    assert equal_steps(nowhere)["raw"] == 0
    answer = Answer(tuple(judge(nowhere)), nowhere.one, nowhere.ranks, nowhere.world, equal_steps=equal_steps(nowhere))
    assert "before clipping: equal" not in str(answer) and "  parameters: equal to" in str(answer)


def test_ranks_that_make_fewer_steps_are_compared_in_those() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            del run.steps[1]

    short = evidence(change)
    answer = Answer(tuple(judge(short)), short.one, short.ranks, short.world, equal_steps=equal_steps(short))
    assert "  parameters: equal in the first step to 0 of" in str(answer)


def test_that_one_device_is_not_the_same_twice_is_said_first() -> None:
    right = evidence()
    noise = cannot("the program is not deterministic on one device", "it draws random numbers: rand", "leave it out")
    finding = found("S5", "the ranks make samples from the same random numbers", "one state")
    answer = Answer((finding,), right.one, right.ranks, right.world, noise=noise.unverified)
    assert (answer.exit_code, answer.to_json()["equal"]) == (1, False)
    assert str(answer).splitlines()[:5] == [
        "the program is not deterministic on one device",
        "  it draws random numbers: rand",
        "  next: leave it out",
        ALONE_SHOW,
        "the ranks make samples from the same random numbers (S5: ranks augment with the same random numbers)",
    ]
    assert "equal to" not in str(answer)
    notes: Any = answer.to_json()["notes"]
    assert notes[0] == "the program is not deterministic on one device: nothing but this was judged"


def test_the_largest_error_is_told() -> None:
    right = evidence()
    assert set(largest_errors(right.one, right.ranks, "gradients").values()) == {0.0}
    wrong = evidence(lambda ranks: scale(ranks[1].steps[1].gradients, 1.25, ["bias"]))
    assert max(largest_errors(wrong.one, wrong.ranks, "gradients").values()) == 0.25
    assert largest_errors(right.one, right.ranks, "kept") == {}


def test_what_is_equal_within_its_own_rounding_alone_is_named() -> None:
    """As the gradient of a key's bias is, which is 0: it does not stand for the others."""
    found = evidence(lambda ranks: scale(ranks[1].steps[1].gradients, 2.5, ["bias"]))
    told = str(Answer((), found.one, found.ranks, found.world))
    assert "gradients: equal to 0 of each tensor's largest value, but for bias, which rounding moves as far" in told
    everything = evidence(lambda ranks: scale(ranks[1].steps[1].gradients, 2.5))
    told = str(Answer((), everything.one, everything.ranks, everything.world))
    assert "gradients: equal, as far as can be told for " in told and "gradients: equal to" not in told


def test_what_ran_in_a_low_precision_alone_is_equal_to_no_error_that_is_told() -> None:
    """Its first step alone was judged."""
    found = evidence()
    answer = Answer((), replace(found.one, lowered=torch.bfloat16), found.ranks, found.world)
    assert "equal to" not in str(answer)


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
