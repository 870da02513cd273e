"""What BatchNorm means over several data-parallel ranks, on real sessions."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from allranks.errors import AllranksError
from allranks.parallel.batchnorm import has_batch_statistics, statistics_fixed
from allranks.task import Hints
from allranks.training.validate import validate
from tests.distributed.pool import Pools
from tests.distributed.sessions import (
    SGD,
    Parts,
    config_of,
    parts_of,
    session_of,
    step_through,
    together,
)
from tests.distributed.tasks import Convolved, Tiny

STEPS = 3
CUT = ("train.global_batch=5", "train.micro_steps=3")  # over four ranks most micro-steps have fillers


def test_what_has_batch_statistics() -> None:
    norm = nn.BatchNorm1d(2)
    assert has_batch_statistics({"": nn.Sequential(norm)})
    assert not has_batch_statistics({"": norm.eval(), "other": nn.GroupNorm(1, 2)})
    # Without running statistics evaluation looks at the batch too.
    assert has_batch_statistics({"": nn.BatchNorm1d(2, track_running_stats=False).eval()})


def test_fixed_statistics_look_at_no_batch() -> None:
    norm: Any = nn.BatchNorm1d(2, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 2), norm).double().eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    with statistics_fixed(model):
        torch.testing.assert_close(model(x), model[0](x), rtol=1e-4, atol=0)
    assert norm.running_mean is None and not list(model.buffers())
    assert model(x).mean(0).abs().max() < 1e-12


def test_fixed_statistics_lie_where_their_layer_computes() -> None:
    """On a later stage of a pipeline the first parameters are on meta; on several devices each layer has its own."""

    def bare(**kwargs: Any) -> Any:
        return nn.BatchNorm1d(2, track_running_stats=False, **kwargs)

    own, behind, before = bare().half(), bare(affine=False), bare(affine=False)
    elsewhere = nn.Linear(3, 2, device="meta")
    model = nn.Sequential(elsewhere, own, elsewhere, before, elsewhere, nn.Linear(2, 2).double())
    ahead = nn.Sequential(elsewhere, behind, nn.Linear(2, 2).double())
    with statistics_fixed(model), statistics_fixed(ahead), statistics_fixed(nn.Sequential(alone := bare(affine=False))):
        kinds = [(norm.running_mean.dtype, norm.running_var.device.type) for norm in (own, before, behind, alone)]
    assert kinds == [(kind, "cpu") for kind in (torch.float16, torch.float16, torch.float64, torch.float32)]
    assert before.running_mean is None


def trained(layout: str, kind: str, count_fillers: bool) -> tuple[Parts, int]:
    """In a worker: what it holds after a few steps, and how many fillers it ran."""
    session = session_of(Tiny(kind=kind), config_of(layout, *SGD, *CUT))
    norms = session.spread.batch_norms
    if count_fillers:
        norms.counting = lambda counts: type(norms).counting(norms, True)  # type: ignore[method-assign]
    batches = [stepped.batch for stepped in step_through(session, STEPS)]
    return parts_of(session), sum(not m.weight for batch in batches for m in batch.micro_steps)


class Again(nn.Module):
    """A model whose statistics are taken again in the backward, by its own code."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


class AgainTask(Tiny):
    def model(self) -> nn.Module:
        return Again(super().model())


def trained_again(again: bool) -> Parts:
    """In a worker: the parameters after a few steps."""
    task = (AgainTask if again else Tiny)(kind="batchnorm")
    session = session_of(task, config_of("ddp", *SGD, *CUT))
    for _ in step_through(session, STEPS):
        pass
    kept = {name.replace("inner.", ""): part for name, part in parts_of(session).items()}
    return {name: part for name, part in kept.items() if "running" not in name and "num_batches" not in name}


@pytest.mark.distributed
def test_a_filler_counts_for_nothing_where_the_model_checkpoints(pool: Pools) -> None:
    plain, again = (together(pool(4).run(trained_again, which)) for which in (False, True))
    assert not far(plain, again)


def over(pool: Pools, size: int, layout: str, kind: str = "batchnorm", count_fillers: bool = False) -> dict[str, Any]:
    ranks = pool(size).run(trained, layout, kind, count_fillers)
    found = together([parts for parts, _ in ranks])
    return found | {"fillers": sum(fillers for _, fillers in ranks)}


def far(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    tensors = [name for name, value in one.items() if isinstance(value, torch.Tensor)]
    return [name for name in tensors if not torch.allclose(one[name], other[name], rtol=1e-11, atol=1e-13)]


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "size"),
    [("ddp", 4), ("fsdp", 4), ("fsdp,sharding=none", 3), ("dp_replicate=2,dp_shard=2", 4), ("tp=2,dp_replicate=2", 4)],
)
def test_running_statistics_are_those_of_one_device(pool: Pools, layout: str, size: int) -> None:
    alone, found = over(pool, 1, "single"), over(pool, size, layout)
    assert found["fillers"] > 0 and not far(alone, found)
    assert int(found["blocks.1.num_batches_tracked"]) == 3 * STEPS
    frozen = torch.stack([found["blocks.9.running_mean"], found["blocks.9.running_var"] - 1])
    assert not frozen.any() and found["blocks.1.running_mean"].any()
    if size == 4 and "tp" not in layout:
        assert far(alone, over(pool, size, layout, count_fillers=True)), "the test would not see counted fillers"


class Activated(nn.BatchNorm1d):
    """With an activation inside, as timm has them."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(value))


class Untouched(nn.BatchNorm1d):
    """Computes its statistics by itself."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (value - value.mean(0)) / value.std(0)


class Made(Tiny):
    """A model made by the test."""

    _make: Callable[[], Any] = nn.Identity
    _hint: Any = None
    _tensor: Any = MappingProxyType({})

    def model(self) -> Any:
        return self._make()

    def hints(self) -> Hints:
        return Hints(batchnorm=self._hint, tensor=self._tensor)


def made(make: Callable[[], Any], hint: Any = None) -> Made:
    task = Made()
    task._make, task._hint = make, hint
    return task


def of_kind(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 4), kind(4), nn.Tanh(), nn.Linear(4, 3))


def stepped(task: Any, layout: str, *overrides: str) -> tuple[Parts, list[str]] | str:
    """In a worker: what it holds after two steps, and what was decided of its statistics; or the refusal."""
    try:
        session = session_of(task, config_of(layout, *SGD, "train.global_batch=13", *overrides))
        list(step_through(session, 2))
    except AllranksError as error:
        return f"{type(error).__name__}: {error}"
    return parts_of(session), [str(d) for d in session.decisions if "batchnorm" in d.because]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, Activated, lambda n: nn.BatchNorm1d(n, track_running_stats=False)])
@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("fsdp", 3), ("tp=2", 2)])
def test_other_kinds_of_batch_norm(pool: Pools, kind: Any, layout: str, size: int) -> None:
    task = made(of_kind(kind))
    task._tensor = {"3": "vocab"} if layout == "tp=2" else {}
    alone, found = (pool(n).run(stepped, task, lay) for n, lay in ((1, "single"), (size, layout)))
    assert not far(*(together([parts for parts, _ in ranks]) for ranks in (alone, found)))


def twice_named() -> nn.Module:
    """One BatchNorm in two places, with a buffer of its own, and a child that has one too."""
    norm = nn.BatchNorm1d(4)
    norm.register_buffer("scale", torch.ones(2))
    norm.child = nn.Module()
    norm.child.register_buffer("table", torch.ones(2))
    return nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Linear(4, 4), norm, nn.Linear(4, 3))


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_one_in_two_places_is_synchronised_once(pool: Pools, layout: str) -> None:
    cut = ("train.global_batch=7", "train.micro_steps=3")
    alone, found = (pool(n).run(stepped, made(twice_named), lay, *cut) for n, lay in ((1, "single"), (4, layout)))
    assert not far(*(together([parts for parts, _ in ranks]) for ranks in (alone, found)))


def copied() -> float:
    """How far a copy of a spread model stands from it after the model was trained."""
    session = session_of(made(of_kind(nn.BatchNorm1d)), config_of("ddp", *SGD, "train.global_batch=13"))
    module = session.spread.bare()
    copy: Any = deepcopy(module)
    list(step_through(session, 1))
    x = torch.ones(2, 5, dtype=torch.float64) * torch.arange(5)
    before = module(x)
    nn.init.zeros_(copy[1].weight)
    nn.init.zeros_(copy[1].bias)
    assert torch.equal(module(x), before), "the copy has weights of its own"
    with torch.no_grad():
        return float((copy(x) - copy[3].bias).abs().max())


@pytest.mark.distributed
def test_a_copy_of_the_model_computes_with_its_own_weights(pool: Pools) -> None:
    assert pool(2).run(copied) == [0.0, 0.0]


SAID = "batch statistics are taken over all 2 data-parallel ranks, because layout.batchnorm=sync {}: the run computes "
SAID += "what one device computes (1 BatchNorm layer)"


@pytest.mark.distributed
def test_what_is_said(pool: Pools) -> None:
    for hint, overrides, source in (
        (None, (), "is the default"),
        ("sync", (), "is what hints().batchnorm says"),
        ("local", ("layout.batchnorm=sync",), "is asked for"),
    ):
        for found in pool(2).run(stepped, made(of_kind(nn.BatchNorm1d), hint), "ddp", *overrides):
            assert found[1] == [SAID.format(source)]
    by_design = {
        "local": "own, because layout.batchnorm=local is asked for: the run computes something else by design, and "
        "evaluates with the mean of the running statistics (1 BatchNorm layer)",
        "broadcast": "own, the running ones rank 0's, because layout.batchnorm=broadcast is asked for: the run "
        "computes something else by design (1 BatchNorm layer)",
    }
    for mode, rest in by_design.items():
        for found in pool(2).run(stepped, made(of_kind(nn.BatchNorm1d)), "ddp", f"layout.batchnorm={mode}"):
            assert found[1] == [f"batch statistics are each of 2 data-parallel ranks' {rest}"]
    for found in pool(2).run(stepped, made(of_kind(lambda n: nn.BatchNorm1d(n).eval())), "ddp"):
        assert found[1] == [], "what is frozen has no batch statistics"
    assert pool(1).run(stepped, made(of_kind(nn.BatchNorm1d)), "single")[0][1] == []


@pytest.mark.distributed
def test_one_that_computes_by_itself_is_refused(pool: Pools) -> None:
    refused = pool(2).run(stepped, made(of_kind(Untouched)), "ddp")
    assert (
        refused
        == [
            "TaskError: 1 is a Untouched, a BatchNorm that computes its statistics itself: call "
            "torch.nn.functional.batch_norm in its forward, which allranks synchronises"
        ]
        * 2
    )


class Measured(Tiny):
    """Evaluates on fewer samples than ranks, with statistics of the batch."""

    def model(self) -> nn.Module:
        model = Convolved()
        model.blocks[1] = nn.BatchNorm1d(7, track_running_stats=False)
        return model

    def dataset(self, split: str) -> Any:
        return torch.utils.data.Subset(super().dataset(split), range(1, 4)) if split != "train" else super().dataset("")


def measured(layout: str) -> tuple[dict[str, float], bool]:
    session = session_of(Measured(), config_of(layout, *CUT))
    before = parts_of(session)
    found = validate(session)
    after = parts_of(session)
    return found, all(torch.equal(before[name][2], after[name][2]) for name in before)


@pytest.mark.distributed
def test_an_evaluation_with_fillers_counts_each_row_once(pool: Pools) -> None:
    ((alone, _),) = pool(1).run(measured, "single")
    for found, unchanged in pool(4).run(measured, "ddp"):
        assert found == pytest.approx(alone, rel=1e-12) and unchanged


class Duel(Made):
    """Two models with BatchNorm that take turns."""

    def model(self) -> Any:
        return {"maker": of_kind(nn.BatchNorm1d)(), "critic": of_kind(nn.BatchNorm1d)()}

    def optimizer(self, parameters: Any) -> Any:
        return {which: torch.optim.SGD(parameters[which], lr=0.1) for which in ("maker", "critic")}

    def step(self, models: Any, batch: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        for which in ("critic", "maker"):
            yield (
                which,
                functional.cross_entropy(models[which](batch["x"]), batch["y"] % 3, reduction="sum"),
                len(batch["y"]),
            )


@pytest.mark.distributed
def test_models_that_take_turns(pool: Pools) -> None:
    cut = ("train.global_batch=7", "train.micro_steps=3")
    alone, found = (pool(n).run(stepped, Duel(), lay, *cut) for n, lay in ((1, "single"), (4, "ddp")))
    assert not far(*(together([parts for parts, _ in ranks]) for ranks in (alone, found)))


def lowered(layout: str, *more: str) -> tuple[Parts, list[float]]:
    config = config_of(layout, *SGD, "train.global_batch=12", *more, precision="bfloat16")
    session = session_of(Tiny(kind="batchnorm"), config)
    losses = [step.loss for step in step_through(session, 3)]
    return parts_of(session), losses


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp layout.gather=bfloat16"])
def test_under_bfloat16_statistics_stay_in_float32(pool: Pools, layout: str) -> None:
    ((parts, alone),) = pool(1).run(lowered, "single")
    ranks = pool(2).run(lowered, *layout.split(" "))
    found = together([parts for parts, _ in ranks])
    assert ranks[0][1] == pytest.approx(alone, rel=0.02)
    for name in ("blocks.1.running_mean", "blocks.1.running_var"):
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name], parts[name][2], rtol=0.02, atol=0.01)
