"""The decision guide, in words and with a model's numbers."""

from allranks.plan import Plan
from allranks.planning.answer import make_plan
from allranks.planning.guide import GUIDE, WIDTH, explanation_document, guide_document, render_explanation, render_guide
from tests.planning.questions import ask


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_the_guide_has_every_turn_within_100_columns() -> None:
    text = render_guide()
    assert max(map(len, text.splitlines())) <= WIDTH
    for turn in GUIDE:
        assert turn.where in squeezed(text) and turn.use in squeezed(text)


def test_the_explanation_has_the_numbers_of_the_plan() -> None:
    question = ask()
    plan = make_plan(question)
    text = render_explanation(plan, question.make_profile)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "8.0B parameters of 16 bytes (weights, gradients, two moments) are 128.5 GB of" in squeezed(text)
    for other in plan.others:
        if other.family:
            assert squeezed(f"{other.estimate.choice.layout}: {other.because}") in squeezed(text)
    assert "tp=16 is refused: tp=16 does not divide 8 key-value heads" in squeezed(text)
    assert plan.best is not None and squeezed(
        f"so: {plan.best.estimate.choice.layout}: {plan.best.because}"
    ) in squeezed(text)


def test_where_all_is_refused_there_are_turns_without_numbers() -> None:
    plan = Plan("m", "c", 0, None, (), ())
    found = explanation_document(plan, ask().make_profile)
    assert found["blocks"] == [] and all(turn["numbers"] == [] for turn in found["guide"])
    assert [{key: turn[key] for key in turn if key != "numbers"} for turn in found["guide"]] == guide_document()[
        "guide"
    ]


def test_the_blocks_say_what_is_gathered_and_kept() -> None:
    question = ask()
    text = render_explanation(make_plan(question), question.make_profile)
    row = next(line for line in text.splitlines() if "32 x layers.*" in line)
    assert "218.1M" in row and "436.2 MB" in row


def test_without_a_choice_there_are_no_numbers() -> None:
    assert "every layout is refused" in render_explanation(Plan("m", "c", 0, None, (), ()), ask().make_profile)
