"""What is said before the first step of a whole training: what has no effect, and what nobody may have meant."""

from allranks.observing.counters import Stopwatch
from allranks.stepping.schedule import Schedule
from allranks.stepping.session import assemble
from tests.distributed.sessions import config_of, processes_of
from tests.training.tasks import Curve

SMALL = ("train.global_batch=6",)


def test_a_schedule_that_nobody_may_have_meant_is_remarked_on() -> None:
    def remarks(*overrides: str, kept: Schedule | None = None) -> list[str]:
        config = config_of("single", *SMALL, "schedule.name=linear", *overrides)
        processes = processes_of(config)
        session = assemble(Curve(), config, processes, Stopwatch(), lambda: (False, False), kept_schedule=kept)
        return [str(decision) for decision in session.decisions if "rate" in decision.what]

    assert remarks("schedule.warmup=2") == []
    (found,) = remarks("train.steps=3", "schedule.warmup=9")
    assert found.startswith(
        "the rate never reaches its peak: warm-up takes 9 steps, because the schedule ends at step 3"
    )
    (found,) = remarks("train.steps=20", kept=Schedule("linear", 0, 60, 0.25))
    assert found.startswith(
        "from step 10 on the rate is 0.25 of its peak, because the schedule of the first start ends"
    )
    assert "`--change schedule.steps schedule.steps=N`" in found
