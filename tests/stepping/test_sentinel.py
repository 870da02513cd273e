"""What one rank notices is said once, until all have heard it."""

from typing import ClassVar

from allranks.data.micro_step import StepBatch
from allranks.stepping.sentinel import StepSentinel, Watch
from allranks.verdict import Verdict
from tests.distributed.tasks import Tiny
from tests.stepping.batches import batch_of, micro_step_of

BATCH = batch_of(micro_step_of(Tiny(), [1, 2]))


class Alarmed(StepSentinel):
    """Finds something from the second look on, and counts its looks."""

    name: ClassVar[str] = "alarmed"

    def __init__(self) -> None:
        self.looks: list[str] = []

    def look(self, which: str, batch: StepBatch) -> Verdict | None:
        self.looks.append(which)
        return Verdict("odd", f"look {len(self.looks)}", (), "") if len(self.looks) > 1 else None


def test_it_is_said_until_all_have_heard_it() -> None:
    alarmed = Alarmed()
    watch = Watch([alarmed], lambda batch: f"step {batch.step}")
    watch.look("a", BATCH)
    assert watch.say(BATCH) == ("step 0", False)
    watch.look("b", BATCH)
    watch.look("c", BATCH)
    assert alarmed.looks == ["a", "b"], "what was found is not looked for again"
    assert watch.say(BATCH) == ("step 0", True) and watch.say(None) == ("", True)
    assert watch.noticed["alarmed"].what == "look 2"
    watch.heard(["other"])
    assert watch.say(BATCH)[1]
    watch.heard(["alarmed"])
    watch.look("d", BATCH)
    assert watch.say(BATCH) == ("step 0", False) and alarmed.looks == ["a", "b"]


def test_what_others_have_found_is_not_looked_for_any_more() -> None:
    alarmed = Alarmed()
    watch = Watch([alarmed])
    watch.heard(["alarmed"])
    watch.look("a", BATCH)
    watch.look("b", BATCH)
    assert not alarmed.looks and not watch.noticed and watch.say(BATCH) == ("", False)


def test_paces_are_told_until_somebody_says_enough() -> None:
    watch = Watch(pace=lambda batch: "here")
    assert watch.say(BATCH) == ("here", False)
    watch.compare_no_pace()
    assert watch.say(BATCH) == ("", False)
