"""What a run has besides model and optimizer, beside what its checkpoint has."""

from typing import Any

from allranks.training.beside import compare_beside
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny

NAMES = ["model.0.weight", "model.ema.weight", "optimizer.ema.exp_avg.0.weight"]


def beside(*overrides: str) -> Any:
    return session_of(Tiny(), config_of("single", *overrides)).beside


def test_nothing_changes_where_both_have_the_same() -> None:
    for ours, theirs in ((beside(), NAMES), (beside("train.ema=0.9"), [*NAMES, "ema.0.weight"])):
        change = compare_beside(ours, theirs)
        assert (change.begins, change.left, change.decisions) == ((), set(), ())


def test_what_the_checkpoint_has_not_begins_and_what_the_run_has_not_ends() -> None:
    change = compare_beside(beside("train.ema=0.9"), NAMES)
    assert (change.begins, change.left) == (("ema.",), set())
    assert [str(decision) for decision in change.decisions] == [
        "the average of the parameters begins here, because the checkpoint has none"
    ]
    change = compare_beside(beside(), [*NAMES, "ema.0.weight", "ema.0.bias"])
    assert (change.begins, change.left) == ((), {"ema.0.weight", "ema.0.bias"})
    assert [decision.what for decision in change.decisions] == ["the average of the parameters ends here"]
