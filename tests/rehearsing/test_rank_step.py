"""A rank's step without its world is the Step that training runs."""

from allranks.layout import Layout
from allranks.profiling.fakes import fake_mode
from allranks.rehearsing.ledger import Ledger
from allranks.rehearsing.rank_step import assemble_rank, processes_of
from allranks.rehearsing.world import fake_world
from allranks.stepping.ema import Ema
from allranks.stepping.guards import StepGuard
from allranks.stepping.passes import PlainPasses
from allranks.stepping.scheduled import ScheduledPasses
from allranks.stepping.step import Step
from tests.distributed.sessions import config_of, session_of
from tests.rehearsing.tasks import Tokens, configured


def test_the_step_and_its_passes_are_those_of_training() -> None:
    for layout, kind in (("tp=2", PlainPasses), ("pp=2", ScheduledPasses)):
        task = Tokens()
        config, found = configured(task, layout, 2)
        with fake_world(1, 2, "gloo"):
            told = assemble_rank(task, config, processes_of(1, found, "gloo", 2), Ledger(), fake_mode())
            assert type(told.step) is Step
            assert type(told.passes._passes) is kind
            assert told.processes.rank == 1 and told.processes.mesh.layout == found


def test_a_step_is_made_of_what_trainings_is_made_of() -> None:
    """Part for part of the same type; the passes are watched, and what looks at values is left out."""
    words = ("train.max_norm=1.0", "train.ema=0.9", "train.global_batch=8")
    task, config = Tokens(), config_of("single", *words, precision="float32")
    with fake_world(0, 1, "gloo"):
        told = assemble_rank(task, config, processes_of(0, Layout(), "gloo", 1), Ledger(), fake_mode())
    trained = {name: type(part) for name, part in vars(session_of(task, config).step).items()}
    rehearsed = {name: type(part) for name, part in vars(told.step).items()}
    assert rehearsed.keys() == trained.keys()
    assert {name for name, kind in trained.items() if rehearsed[name] is not kind} == {"_passes", "_watch"}
    assert told.step._max_norm == 1.0 and type(told.step._ema) is Ema and type(told.step.guard) is StepGuard


def test_the_batch_is_this_ranks() -> None:
    task = Tokens()
    config, found = configured(task, "ddp", 4, "train.micro_batch=1")
    with fake_world(2, 4, "gloo"):
        told = assemble_rank(task, config, processes_of(2, found, "gloo", 4), Ledger(), fake_mode())
    assert [len(one.positions) for one in told.batch.micro_steps] == [1, 1]
    assert told.batch.targets == 2 * task.seq
