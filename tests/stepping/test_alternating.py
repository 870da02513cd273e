"""A step of the Task's own: a GAN computes what a plain loop computes, whatever the layout."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.errors import LayoutError, TaskError
from allranks.parallel.spread import Spread
from allranks.stepping.session import Session
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import ReferenceStep
from tests.distributed.pool import Pools
from tests.distributed.sessions import (
    config_of,
    initial_model,
    parts_of,
    processes_of,
    session_of,
    step_through,
    together,
)
from tests.distributed.tasks import IGNORED, MODELS, Block, Counted, Points, Tiny, mlp, scalar_gain, vector_gain

STEPS, LR, DECAY = 3, 0.1, 0.01
OPTIMIZER = ("optimizer.name=sgd", f"optimizer.lr={LR}", "optimizer.momentum=0.9", f"optimizer.weight_decay={DECAY}")
Yields = Iterator[tuple[str, torch.Tensor, int]]


class Critic(nn.Module):
    """Points to a score; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(gain) for gain in (vector_gain(), scalar_gain()))
        self.last, self.never = nn.Linear(7, 1), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        score: torch.Tensor = self.last(hidden)
        return score


class Gan(Tiny):
    """Two models in turn; `fake` is made before the critic's update and used again after it."""

    def model(self) -> Any:
        maker = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 5))
        frozen = nn.Linear(5, 5).requires_grad_(False)
        return {"maker": maker, "critic": Critic(), "frozen": frozen}

    def step(self, models: Any, batch: Any) -> Yields:
        maker, critic = models["maker"], models["critic"]
        x, size = models["frozen"](batch["x"]), len(batch["x"])
        fake = maker(batch["x"][:, :3])
        yield "critic", (functional.softplus(-critic(x)) + functional.softplus(critic(fake.detach()))).sum(), size
        with torch.no_grad():
            critic(x)  # called and not differentiated: what it gathers must not outlive the next update
        # This one's backward leaves gradients on the critic, too, which no update may see.
        yield "maker", functional.softplus(-critic(fake)).sum(), size


def plain_gan(ranks: Sequence[Sequence[RecordedStep]], max_norm: float) -> list[ReferenceStep]:
    """The loop that everybody writes, on one device, over the samples that the ranks fed."""
    models = {which: module.double() for which, module in initial_model(Gan()).items()}
    trained = {which: models[which] for which in ("critic", "maker")}
    optimizers = {
        which: torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
        for which, module in trained.items()
    }
    steps = []
    for step in range(STEPS):
        samples = fed(ranks, step, range(len(ranks))).values()
        batch = default_collate([Points()[sample] for sample in samples])
        batch["x"] = batch["x"].double()
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        norm = torch.zeros(())
        for which, loss, targets in Gan().step(models, batch):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            (loss / targets).backward()
            losses.append(float(loss.detach()) / targets)
            named = trained[which].named_parameters()
            gradients |= {f"{which}.{name}": p.grad.clone() for name, p in named if p.grad is not None}
            norm = nn.utils.clip_grad_norm_(trained[which].parameters(), max_norm)
            optimizers[which].step()
        parameters = {
            f"{which}.{name}": p.detach().clone() for which, m in models.items() for name, p in m.named_parameters()
        }
        steps.append(ReferenceStep(losses[0], float(norm), gradients, parameters))
    return steps


def record(layout: str, global_batch: int, micro_steps: int, max_norm: float) -> list[RecordedStep]:
    cut = f"train.global_batch={global_batch}", f"train.micro_steps={micro_steps}", f"train.max_norm={max_norm}"
    config = config_of(layout, *cut, *OPTIMIZER, steps=STEPS)
    return record_run(Gan(), config, processes_of(config), STEPS)


CASES = [
    ("single", 1, 12, 1),
    ("single", 1, 7, 3),
    ("ddp", 2, 7, 1),
    ("ddp", 3, 5, 3),  # some rank has no sample in a micro-step
    ("fsdp", 2, 7, 1),
    ("fsdp", 3, 5, 3),
    ("fsdp,sharding=grad_op", 2, 7, 3),
    ("fsdp,sharding=none", 2, 7, 3),
    ("dp_replicate=2,dp_shard=2", 4, 13, 3),
]


@pytest.mark.sample(3)
@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "world_size", "global_batch", "micro_steps"), CASES)
def test_a_gan_is_the_plain_loop(
    pool: Pools, layout: str, world_size: int, global_batch: int, micro_steps: int
) -> None:
    max_norm = 0.1
    ranks = pool(world_size).run(record, layout, global_batch, micro_steps, max_norm)
    reference = plain_gan(ranks, max_norm)
    assert min(step.norm for step in reference) > max_norm, "nothing is clipped"
    differences = compare(ranks, reference)
    assert not differences, "; ".join(map(str, differences[:5]))


def gan_of_copies(ranks: Sequence[Sequence[RecordedStep]], every: int) -> list[list[ReferenceStep]]:
    """Each rank's steps, where each trains a copy of its own that follow their mean after every so many steps."""
    agreed = {which: module.double() for which, module in initial_model(Gan()).items()}
    copies = [copy.deepcopy(agreed) for _ in ranks]
    optimizers = [
        {
            which: torch.optim.SGD(models[which].parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
            for which in ("critic", "maker")
        }
        for models in copies
    ]
    found: list[list[ReferenceStep]] = [[] for _ in ranks]
    for step in range(STEPS):
        samples = [[Points()[sample] for sample in rank[step].samples] for rank in ranks]
        batches = [{"x": default_collate(own)["x"].double()} for own in samples]
        turns = [Gan().step(models, batch) for models, batch in zip(copies, batches, strict=True)]
        first, gradients, norms = 0.0, [dict[str, torch.Tensor]() for _ in ranks], [0.0 for _ in ranks]
        for turn in range(2):
            yielded = [next(one) for one in turns]
            whole = sum(targets for _, _, targets in yielded)
            first += sum(float(loss.detach()) for _, loss, _ in yielded) / whole * (turn == 0)
            for index, (which, loss, _) in enumerate(yielded):
                for optimizer in optimizers[index].values():
                    optimizer.zero_grad()
                (loss / whole * len(ranks)).backward()
                named = list(copies[index][which].named_parameters())
                gradients[index] |= {f"{which}.{name}": p.grad.clone() for name, p in named if p.grad is not None}
                norms[index] = float(nn.utils.clip_grad_norm_([p for _, p in named], float("inf")))
                optimizers[index][which].step()
        if (step + 1) % every == 0:
            for same in zip(*(p for models in copies for p in [everyone(models).values()]), strict=True):
                mean = torch.stack([p.detach() for p in same]).mean(0)
                for parameter in same:
                    parameter.data.copy_(mean)
        for index, models in enumerate(copies):
            parameters = {name: p.detach().clone() for name, p in everyone(models).items()}
            found[index].append(ReferenceStep(first, norms[index], gradients[index], parameters))
    return found


def everyone(models: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{which}.{name}": p for which, module in models.items() for name, p in module.named_parameters()}


def record_copies() -> list[RecordedStep]:
    local = "layout.local_sgd=3", "layout.outer_lr=1.0", "layout.outer_momentum=0.0"
    config = config_of("ddp", "train.global_batch=7", *local, *OPTIMIZER, steps=STEPS)
    return record_run(Gan(), config, processes_of(config), STEPS)


@pytest.mark.distributed
def test_copies_of_a_gan_that_train_by_themselves(pool: Pools) -> None:
    ranks = pool(2).run(record_copies)
    for recording, reference in zip(ranks, gan_of_copies(ranks, 3), strict=True):
        differences = compare([recording], reference)
        assert not differences, "; ".join(map(str, differences[:5]))


class Pairs(Tiny):
    """Two forwards of one model and a loss that couples the samples: the single optimizer's name is ""."""

    coupled: ClassVar[bool] = True

    def step(self, models: Any, batch: Any) -> Yields:
        first, second = models(batch["x"]), models(batch["x"] + 0.1)
        yield "", functional.cross_entropy(first @ second.T, torch.arange(len(first)), reduction="sum"), len(first)


def test_one_model_with_two_forwards() -> None:
    session = session_of(Pairs(), config_of("single", *OPTIMIZER))
    before = session.spread.local("0.weight").clone()
    (stepped,) = step_through(session, 1)
    assert stepped.outcome.targets is not None and stepped.outcome.targets.item() == stepped.batch.size
    assert not torch.equal(before, session.spread.local("0.weight"))


class Gathering(Tiny):
    """As `Pairs`, of all ranks' samples, without a word that it couples them."""

    def step(self, models: Any, batch: Any) -> Yields:
        rows = models(batch["x"])
        everyone = self.world.gather(rows)
        yield "", (rows @ everyone.T).logsumexp(1).sum(), len(rows)


def gathering(*overrides: str) -> str:
    try:
        list(step_through(session_of(Gathering(), config_of("ddp", "train.global_batch=6", *overrides)), 1))
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_copies_by_themselves_gather_nothing_of_each_other(pool: Pools) -> None:
    assert pool(2).run(gathering) == ["", ""]
    for said in pool(2).run(gathering, "layout.local_sgd=3"):
        assert said.startswith("Gathering.step gathers the rows of all ranks, and with layout.local_sgd=3 copies train")


class Given(Tiny):
    """A step given by the test."""

    _step: Callable[[Any, Any], Any]

    def model(self) -> Any:
        return {"a": mlp(), "b": mlp()}

    def step(self, models: Any, batch: Any) -> Any:
        return self._step(models, batch)


def given(step: Callable[[Any, Any], Any], *overrides: str) -> Session:
    task = Given.__new__(Given)
    task._step, task.kind = step, "mlp"
    return session_of(task, config_of("single", "train.global_batch=6", *overrides))


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(module(batch["x"]), batch["y"], reduction="sum")


def by_size(models: Any, batch: Any) -> Yields:
    yield ("a" if len(batch["x"]) > 1 else "b"), loss_of(models["a"], batch), 1


def some_stop(models: Any, batch: Any) -> Yields:
    if len(batch["x"]) > 1:
        yield "a", loss_of(models["a"], batch), 1


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda models, batch: iter([3]), r"step\(\) yielded int: yield \(name, loss_sum, targets\)"),
        (lambda models, batch: iter([("a", 3.0, 1)]), r"step\(\) yielded tuple: yield \(name, loss_sum, targets\)"),
        (
            lambda models, batch: iter([("c", loss_of(models["a"], batch), 1)]),
            r"step\(\) yielded the name 'c'; the optimizers are 'a', 'b'",
        ),
        (by_size, r"step\(\): in turn 1 the micro-steps yielded 'a', 'b': all must yield one name"),
        (some_stop, r"step\(\): in turn 1 the micro-steps yielded 'a', nothing more: all must yield one name"),
        (lambda models, batch: iter([]), r"step\(\) ended without yielding"),
    ],
)
def test_a_step_that_breaks_the_contract_is_refused(step: Callable[[Any, Any], Any], message: str) -> None:
    session = given(step, "train.micro_steps=4")  # of 2, 2, 1 and 1 samples
    with pytest.raises(TaskError, match=message):
        list(step_through(session, 1))


def by_rank(models: Any, batch: Any) -> Yields:
    which = "ab"[dist.get_rank()]
    yield which, loss_of(models[which], batch), 1


def early_end(models: Any, batch: Any) -> Yields:
    for which in "ab"[: 2 - dist.get_rank()]:
        yield which, loss_of(models[which], batch), 1


def refusal_under_ddp(step: Callable[[Any, Any], Any]) -> str:
    task = Given.__new__(Given)
    task._step, task.kind = step, "mlp"
    session = session_of(task, config_of("ddp", "train.global_batch=6"))
    with pytest.raises(TaskError) as refused:
        list(step_through(session, 1))
    return str(refused.value)


@pytest.mark.distributed
def test_ranks_that_yield_different_names_are_refused_on_all(pool: Pools) -> None:
    message = "step(): in turn 1 the ranks yielded 'a', 'b': all must yield one name"
    assert pool(2).run(refusal_under_ddp, by_rank) == [message] * 2
    message = "step(): in turn 2 the ranks yielded 'b', nothing more: all must yield one name"
    assert pool(2).run(refusal_under_ddp, early_end) == [message] * 2


def test_each_turn_of_a_micro_step_draws_its_own_numbers_and_the_same_again() -> None:
    drawn: list[float] = []

    def step(models: Any, batch: Any) -> Yields:
        for which in ("a", "b", "a"):
            drawn.append(float(torch.rand(())))
            yield which, loss_of(models[which], batch), 1

    for _ in range(2):
        list(step_through(given(step, "train.micro_steps=2"), 2))
    assert len(set(drawn)) == len(drawn) / 2 == 12
    assert drawn[:12] == drawn[12:]


def test_the_last_micro_step_of_each_turn_is_the_one_that_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(models: Any, batch: Any) -> Yields:
        for which in ("a", "b"):
            yield which, loss_of(models[which], batch), 1

    session = given(step, "train.micro_steps=3")
    flags: list[bool] = []
    monkeypatch.setattr(Spread, "synchronise", lambda self, last: flags.append(last))
    list(step_through(session, 1))
    # The third round finds that the generators have ended.
    assert flags == [False, False, True] * 3


class CountedGan(Tiny):
    """Only its buffers are looked at."""

    def model(self) -> Any:
        return {"a": Counted(), "b": Counted()}

    def step(self, models: Any, batch: Any) -> Yields:
        yield "a", loss_of(models["a"], batch), 1
        yield "b", loss_of(models["b"], batch), 1


def count_calls() -> tuple[int, int, int]:
    session = session_of(CountedGan(), config_of("ddp", "train.global_batch=5", "train.micro_steps=3"))
    real = sum(m.weight for stepped in step_through(session, 2) for m in stepped.batch.micro_steps)
    return real, int(session.spread.local("a.calls")), int(session.spread.local("b.calls"))


@pytest.mark.distributed
def test_fillers_do_not_touch_buffers(pool: Pools) -> None:
    ranks = pool(3).run(count_calls)
    assert all(real == a == b for real, a, b in ranks)
    assert sum(real for real, _, _ in ranks) == 10 < 2 * 3 * 3


def unused_layers(layout: str) -> Any:
    config = config_of(layout, *OPTIMIZER, "train.global_batch=7")
    session = session_of(Gan(), config)
    list(step_through(session, 2))
    return parts_of(session)


@pytest.mark.distributed
def test_what_gets_no_gradient_is_left_alone(pool: Pools) -> None:
    """Weight decay moves what has a gradient of zeros; under every layout as on one device it does not move."""
    initial = initial_model(Gan())["critic"].never.weight.detach().double()
    for layout in ("ddp", "fsdp"):
        found = together(pool(2).run(unused_layers, layout))
        assert torch.equal(found["critic.never.weight"], initial)
        assert "optimizer.critic.momentum_buffer.critic.never.weight" not in found


class Routed(Tiny):
    """Two models with experts, by turns; the first one's loss reaches the second, too, which does not learn from it."""

    def model(self) -> Any:
        return {"one": MODELS["moe"](), "other": MODELS["moe"]()}

    def optimizer(self, parameters: Any) -> Any:
        return {name: torch.optim.SGD(own, lr=0.1, momentum=0.9) for name, own in parameters.items()}

    def step(self, models: Any, batch: Any) -> Yields:
        targets = int((batch["y"] != IGNORED).sum())
        first = self.loss(models["one"](batch["x"]), batch)
        yield "one", first + 0.5 * self.loss(models["other"](batch["x"]), batch), targets
        yield "other", self.loss(models["other"](batch["x"]), batch), targets


def routed(layout: str, cut: tuple[str, ...]) -> tuple[Any, list[list[int]]]:
    """In a worker: everything at the end, and the samples of each step."""
    session = session_of(Routed(kind="moe"), config_of(layout, *cut))
    told = [
        [int(s) for m in stepped.batch.micro_steps if m.weight for s in m.samples]
        for stepped in step_through(session, 3)
    ]
    return parts_of(session), told


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("dp_replicate=2,ep=2", 2),
        ("dp_replicate=4,ep=2", 4),
        ("dp_shard=4,ep=2", 4),
        ("dp_shard=4,ep=2,sharding=optimizer", 4),
    ],
)
def test_experts_that_are_cut_learn_by_turns(pool: Pools, layout: str, size: int) -> None:
    """As in a plain loop; of 5 samples in 3 micro-steps some rank has none."""
    ranks = pool(size).run(routed, layout, ("train.global_batch=5", "train.micro_steps=3"))
    found = together([parts for parts, _ in ranks])
    task = Routed(kind="moe")
    dataset, models = task.dataset("train"), initial_model(task)
    optimizers = task.optimizer({name: list(model.double().parameters()) for name, model in models.items()})
    for step in range(3):
        batch = default_collate([dataset[sample] for _, samples in ranks for sample in samples[step]])
        assert len(batch["x"]) == 5
        for which, loss, targets in task.step(models, batch):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            (loss / targets).backward()
            optimizers[which].step()
        for model in models.values():
            model.update_balance()
    for which, model in models.items():
        for name, value in model.named_parameters():
            error = (found[f"{which}.{name}"] - value.detach()).abs().max()
            assert error <= 1e-12 * value.detach().abs().max(), f"{which}.{name}"
