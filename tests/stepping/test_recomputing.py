"""What is alike, who is at fault, and who can compute for whom."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.layout_string import parse_layout
from allranks.stepping.alike import everyones
from allranks.stepping.recomputing import BOUNDS, Difference, can_swap, differing, explain, measure
from allranks.task import Task
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import CountingTask, Tiny
from tests.stepping.batches import batch_of, micro_step_of

HOSTS = ("a", "b", "c", "d")
BOUND = BOUNDS[torch.float32]


def rows(**gradients: torch.Tensor) -> Any:
    return {name: (hash(tuple(value.tolist())), *measure(name, value)) for name, value in gradients.items()}


def test_bits_or_a_part_of_the_norm() -> None:
    one = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded, wrong = one * (1 + 1e-6), one.clone()
    wrong[7] += 1.0
    for other, bound, alike in (
        (rounded, BOUND, True),
        (rounded, None, False),
        (wrong, BOUND, False),
        (one, None, True),
    ):
        assert (differing(rows(w=one), rows(w=other), bound) == ()) is alike
    assert differing(rows(w=one), rows(), BOUND) == ("w",)
    for wild in (float("nan"), float("inf")):
        assert differing(rows(w=one), rows(w=one * wild), BOUND) == ("w",)
        assert differing(rows(w=one * wild), rows(w=one), BOUND) == ("w",)
        gone, gone_too = {"w": (1, wild, float("nan"))}, {"w": (2, wild, wild)}
        assert differing(gone, gone_too, BOUND) == (), "both devices say so: the fault is in the loss or the data"
        assert differing(gone | rows(v=one), gone_too | rows(v=wrong), BOUND) == ("v",)


def test_what_is_numerically_zero_is_noise() -> None:
    large, noise = torch.ones(100), torch.randn(100, generator=torch.Generator().manual_seed(1)) * 1e-9
    assert differing(rows(w=large, b=noise), rows(w=large, b=-noise), BOUND) == ()
    assert differing(rows(b=noise), rows(b=-noise), BOUND) == ("b",)


def test_a_projection_measures_a_distance() -> None:
    """Over many names the mean square of the projections' difference is the square of the distance."""
    one, other = (torch.randn(300, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    squares = [(measure(f"{n}", one)[1] - measure(f"{n}", other)[1]) ** 2 for n in range(400)]
    distance = float((one.double() - other.double()).norm())
    assert (sum(squares) / len(squares)) ** 0.5 == pytest.approx(distance, rel=0.15)
    assert measure("w", one)[0] == pytest.approx(float(one.double().norm()))


def test_who_is_part_of_every_difference_is_at_fault() -> None:
    names = ("0.weight", "0.bias")
    found = explain([Difference(0, 1, names), Difference(1, 2, names)], HOSTS, range(4), 30, 20)
    assert found.what.startswith(
        "after step 30 rank 1 (b) computes other gradients than another rank for the same samples"
    )
    assert (
        found.what.endswith("0.weight (and 1 more)") and "resume from a checkpoint of step 20 or before" in found.next
    )
    assert found.evidence[-1] == "after step 20 all were alike"
    both = explain([Difference(0, 1, names), Difference(1, 0, names)], HOSTS, range(4), 30, 0)
    assert "rank 0 (a) or rank 1 (b)" in both.what and "take the device of rank 0 (a) or rank 1 (b)" in both.next
    alone = explain([Difference(2, 2, names[:1])], HOSTS, range(4), 30, 0)
    assert "after step 30 rank 2 (c) computes other gradients a second time: 0.weight" in alone.what
    apart = explain([Difference(0, 0, names), Difference(1, 1, names)], HOSTS, range(4), 30, 0)
    assert "rank 0 (a) or rank 1 (b)" in apart.what


def test_ranks_that_compute_the_same_samples_together_are_at_fault_together() -> None:
    """Three data-parallel ranks of two each (tp): the second one computes wrongly, and both of its ranks show it."""
    dp_ranks, hosts = [0, 0, 1, 1, 2, 2], "aabbcc"
    pairs = [Difference(rank, (rank + 2) % 6, ("w",)) for rank in (0, 1, 2, 3)]
    assert "after step 30 rank 2 (b) or rank 3 (b) computes" in explain(pairs, hosts, dp_ranks, 30, 0).what
    shard = [Difference(0, 2, ("w",)), Difference(2, 4, ("w",))]
    assert "after step 30 rank 2 (b) computes" in explain(shard, hosts, dp_ranks, 30, 0).what, "only its own part shows"


@pytest.mark.parametrize(
    ("layout", "size", "swaps"),
    [
        ("single", 1, False),
        ("ddp", 3, True),
        ("dp_replicate=2,tp=2", 4, True),
        ("dp_shard=2,sharding=optimizer", 2, True),
        ("fsdp", 2, False),
        ("dp_replicate=2,dp_shard=2", 4, True),
        ("dp_replicate=2,sharding=none", 2, True),
        ("dp_replicate=2,dp_shard=2,ep=2", 4, False),
        ("dp_replicate=2,ep=2", 2, False),
    ],
)
def test_who_can_compute_for_whom(layout: str, size: int, swaps: bool) -> None:
    resolved = Layout.resolve(parse_layout(layout), size)
    assert can_swap(resolved, fixed=False) is swaps and not can_swap(resolved, fixed=True)


def test_what_cannot_be_made_again_is_refused() -> None:
    class Own(Tiny):
        def step(self, models: Any, batch: Any) -> Any:
            yield "", models(batch["x"]).sum(), 1

    with pytest.raises(ConfigError, match=r"guard.recompute_every=5 makes one .* Own has a step\(\) of its own"):
        session_of(Own(), config_of("single", "guard.recompute_every=5"))
    assert session_of(Tiny(), config_of("single")).posted.recomputing is None
    muted = config_of("single", "guard.recompute_every=5", "guard.mute=gradients")
    assert session_of(Tiny(), muted).posted.recomputing is None


def test_nothing_of_it_stays() -> None:
    session = session_of(Tiny(), config_of("single", "guard.recompute_every=5"))
    recomputing = session.posted.recomputing
    assert recomputing is not None and [recomputing.due(step) for step in (1, 5, 10, 11)] == [False, True, True, False]
    said = [str(one) for one in session.decisions if "computed twice" in str(one)]
    assert len(said) == 1 and "compared bit by bit" in said[0] and "each rank computes its own" in said[0]
    before, generators = [t.clone() for t in session.spread.tensors.values()], torch.get_rng_state()
    told = recomputing.tell(batch_of(micro_step_of(Tiny(), [1, 2, 3])))
    assert told["totals"][0] == told["totals"][1] != 0 and recomputing.judge([told], 5) is None
    assert all(map(torch.equal, before, session.spread.tensors.values())) and torch.get_rng_state().equal(generators)
    assert all(parameter.grad is None for parameter in session.spread.trainable().values())


def test_where_bits_may_differ_a_bound_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, whose kernels are not asked to be deterministic."""
    monkeypatch.setattr("allranks.stepping.recomputing._kernels", lambda device: "")
    session = session_of(Tiny(), config_of("single", "guard.recompute_every=5", precision="float32"))
    recomputing = session.posted.recomputing
    assert recomputing is not None
    assert any("compared within 0.001 of their norm" in str(one) for one in session.decisions)
    batch = batch_of(micro_step_of(Tiny(), [1, 2, 3]))
    compute, factors = session.task.loss, iter([1.0, 1.0 + 1e-6, 1.0, 1.1])
    monkeypatch.setattr(session.task, "loss", lambda output, batch: compute(output, batch) * next(factors))
    told = recomputing.tell(batch)
    assert told["totals"][0] != told["totals"][1] and recomputing.judge([told], 5) is None
    verdict = recomputing.judge([recomputing.tell(batch)], 10)
    assert verdict is not None and "computes other gradients a second time" in verdict.what
    assert verdict.evidence[-1] == "after step 5 all were alike"


class Permuted(Task):
    """Images that collate permutes, so that they lie as channels-last: a convolution takes another kernel there."""

    channels: int = 3
    """Of which three are looked at: between others they do not travel as they lie."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(3)
        return TensorDataset(torch.randn(64, 16, 16, self.channels, generator=generator), torch.arange(64) % 10)

    def collate(self, samples: list[Any]) -> Any:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images)[..., :3].permute(0, 3, 1, 2), torch.stack(labels)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch[1], reduction="sum")


class Opaque(Tiny):
    """Its batches hold something that is neither a tensor nor JSON."""

    def collate(self, samples: list[Any]) -> Any:
        return super().collate(samples) | {"about": object()}


def looked(kind: str, layout: str) -> list[Any]:
    """In a worker: what is found after each of two steps, and whose gradients this rank has computed."""
    made: dict[str, Task] = {
        "counting": CountingTask(),
        "opaque": Opaque(),
        "permuted": Permuted(),
        "between": Permuted(channels=9),
    }
    task = made.get(kind) or Tiny(kind=kind)
    cut = ("train.global_batch=6", "train.micro_steps=2")
    session = session_of(task, config_of(layout, *cut, "guard.recompute_every=1", precision="float32"))
    recomputing, found = session.posted.recomputing, list[Any]()
    assert recomputing is not None
    for number, stepped in enumerate(step_through(session, 2), 1):
        told = everyones(recomputing.tell(stepped.batch), dist.group.WORLD, torch.device("cpu"))
        found.append(recomputing.judge(told, number))
    return [*found, told[dist.get_rank()]["of"]]


ALIKE = [
    ("counting", "ddp", 2, True),
    ("tied", "dp_shard=2,sharding=optimizer", 2, True),
    ("transformer", "fsdp", 2, False),
    ("batchnorm", "ddp", 2, False),
    ("opaque", "ddp", 2, False),
    ("permuted", "ddp", 2, True),
    ("between", "ddp", 2, True),
    ("transformer", "dp_replicate=2,sharding=none", 2, True),
]
ALIKE_OF_FOUR = [
    ("transformer", "dp_replicate=2,tp=2", 4, True),
    ("transformer", "dp_replicate=2,cp=2", 4, True),
    ("moe", "dp_replicate=4,ep=2", 4, False),
    ("transformer", "dp_replicate=2,dp_shard=2", 4, True),
    ("tied", "dp_replicate=2,dp_shard=2", 4, True),
    ("opaque", "dp_replicate=2,dp_shard=2", 4, False),
]


@pytest.mark.sample(6)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout", "size", "swaps"),
    [*ALIKE, *(pytest.param(*one, marks=pytest.mark.full) for one in ALIKE_OF_FOUR)],
)
def test_devices_that_compute_rightly_are_alike(pool: Pools, kind: str, layout: str, size: int, swaps: bool) -> None:
    for rank, (first, second, whose) in enumerate(pool(size).run(looked, kind, layout)):
        assert first is None and second is None, (first, second)
        assert (whose != rank) is swaps
