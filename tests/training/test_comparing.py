"""What follows a finding, and that all ranks of a round hear of it."""

from typing import Any

import pytest

from allranks.config_guard import SENTINELS, GuardConfig
from allranks.errors import GuardError
from allranks.stepping.posting import Posted
from allranks.stepping.sentinel import Rounds, RoundSentinel, StepSentinel, Watch
from allranks.training.comparing import Comparing, Findings
from allranks.verdict import Verdict
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, processes_of

ODD = Verdict("odd", "something is odd", ("why",), "look")


class Counting(RoundSentinel):
    """Finds something where the ranks tell other numbers than `due`."""

    name = "linkage"

    def __init__(self, tells: int, due: int) -> None:
        self._tells, self._due = tells, due
        self.rounds = 0

    def tell(self) -> int:
        self.rounds += 1
        return self._tells

    def judge(self, told: Any, step: int) -> Verdict | None:
        return None if sum(told) == self._due else ODD


class Noticing(StepSentinel):
    name = "samples"

    def look(self, which: str, batch: Any) -> Verdict | None:
        return ODD


def findings(**guard: Any) -> tuple[Findings, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []
    return Findings(GuardConfig(**guard), lambda verdict, step: told.append((str(verdict), step))), told


def test_a_finding_is_told_once_and_only_what_spoils_the_state_ends_the_run() -> None:
    those, told = findings()
    those.conclude("schedule", ODD, 3)
    those.conclude("schedule", ODD, 4)
    those.conclude("linkage", None, 4)
    ((text, step),) = told
    assert step == 3
    assert "something is odd; the run goes on" in text and "look; guard.mute=schedule silences this sentinel" in text
    for name in ("replicas", "shards", "steps", "checkpoint"):
        with pytest.raises(GuardError, match="something is odd; the run ends, and nothing more is saved; look"):
            those.conclude(name, ODD, 5)


def test_the_config_says_what_follows() -> None:
    warned, told = findings(on_finding="warn", mute="schedule")
    warned.conclude("replicas", ODD, 1)
    warned.conclude("schedule", ODD, 1)
    assert len(told) == 1 and "the run goes on" in told[0][0]
    stopped, _ = findings(on_finding="stop")
    with pytest.raises(GuardError):
        stopped.conclude("schedule", ODD, 1)


@pytest.mark.parametrize("name", SENTINELS)
def test_each_is_muted_by_its_name_and_no_other(name: str) -> None:
    those, told = findings(mute=name, on_finding="warn")
    for one in SENTINELS:
        those.conclude(one, ODD, 2)
    assert len(told) == len(SENTINELS) - 1
    assert not any(f"guard.mute={name} silences" in text for text, _ in told)


def test_rounds_are_at_the_first_step_and_every_so_many_until_something_is_found() -> None:
    those, told = findings()
    sentinel = Counting(1, due=1)
    comparing = Comparing(Posted(rounds=Rounds(3), comparing=(sentinel,)), those, None, config_device())
    assert [step for step in range(5, 13) if comparing.due(step)] == [5, 6, 9, 12]
    comparing.compare(6)
    assert told == [] and sentinel.rounds == 1 and comparing.due(9)
    sentinel._due = 2
    comparing.compare(9)
    assert [step for _, step in told] == [9]
    assert not comparing.due(12), "what has found something looks no further"


class Spoilt(Counting):
    name = "replicas"


def test_before_a_save_only_what_spoils_the_state_is_compared_and_once_a_step() -> None:
    def comparing(every: int, *sentinels: RoundSentinel) -> Comparing:
        return Comparing(Posted(rounds=Rounds(every), comparing=sentinels), findings()[0], None, config_device())

    other, copies = Counting(1, due=2), Spoilt(1, due=1)
    those = comparing(200, other, copies)
    those.compare_copies(7)
    assert (other.rounds, copies.rounds) == (0, 1)
    those.compare_copies(7)
    those.compare(8)
    those.compare_copies(8)
    assert (other.rounds, copies.rounds) == (1, 2), "a round has compared them already"
    copies._due = 2
    with pytest.raises(GuardError, match="something is odd; the run ends, and nothing more is saved"):
        those.compare_copies(9)
    never = Spoilt(1, due=2)
    comparing(0, never).compare_copies(7)
    assert never.rounds == 0, "guard.digest_every=0 is never"


def heard(config: Any) -> tuple[list[tuple[str, int]], list[bool]]:
    """In a worker of two: rank 1 alone notices something, in the step before the round."""
    those, told = findings()
    processes = processes_of(config)
    watch = Watch([Noticing()])
    sentinel = Counting(processes.rank, due=1)
    posted = Posted(watch=watch, rounds=Rounds(1), comparing=(sentinel,))
    comparing = Comparing(posted, those, processes.world_group, processes.device)
    if processes.rank == 1:
        watch.look("", None)  # type: ignore[arg-type]
    comparing.compare(1)
    comparing.hear(1)
    watch.look("", None)  # type: ignore[arg-type]
    return told, [bool(watch.noticed)]


@pytest.mark.distributed
def test_all_ranks_hear_what_one_has_noticed(pool: Pools) -> None:
    ranks = pool(2).run(heard, config_of("ddp"))
    for told, noticed in ranks:
        ((text, step),) = told
        assert step == 1 and "on rank 1" in text and "something is odd" in text
        assert noticed == [False], "all have heard: it has nothing more to say"


def config_device() -> Any:
    """Where one process compares."""
    return processes_of(config_of("single")).device
