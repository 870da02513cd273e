"""The one code path that applies a layout."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from allranks.errors import AllranksError, TaskError
from allranks.layout import Layout
from allranks.parallel.initial import Source
from allranks.parallel.mesh import build_mesh
from allranks.parallel.parallelize import Spread, has_batch_statistics, parallelize
from allranks.parallel.precision import choose_precision
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS

SINGLE = Layout(kind="single")


def seed() -> None:
    torch.manual_seed(0)


def spread(build: Any, layout: Layout = SINGLE, precision: str = "float32", **options: Any) -> Spread:
    """`build` under `layout`, in this process or in a worker."""
    mesh = build_mesh(layout, "cpu")
    group = dist.group.WORLD if mesh.device_mesh is not None else None
    return parallelize(
        build,
        mesh,
        choose_precision(precision, None, "cpu"),
        torch.device("cpu"),
        source=Source(group, 0, mesh.rank == 0),
        seed=seed,
        **options,
    )


def test_one_process_gets_the_users_own_module() -> None:
    built = MODELS["tied"]()
    found = spread(lambda: built)
    assert found.modules == {"": built}
    assert found.bare() is built
    assert (found.divisor, found.decisions) == (1, ())
    found.synchronise(last=True)
    found.reduce_scalars()
    found.reshard()
    found.expect_unused()
    assert found.modules == {"": built}


def test_trainable_names_each_tied_one_once() -> None:
    found = spread(MODELS["tied"])
    assert "embedding.weight" in found.trainable()
    assert "head.weight" not in found.trainable()
    assert found.map["head.weight"].alias_of == "embedding.weight"
    frozen = spread(MODELS["frozen"]).trainable()
    assert not any(name.startswith(("first", "blocks.1", "steps")) for name in frozen)
    assert "blocks.0.gain" in frozen


def test_trainable_of_one_of_several() -> None:
    found = spread(lambda: {"g": nn.Linear(2, 2), "gg": nn.Linear(2, 1)})
    assert list(found.trainable("g")) == ["g.weight", "g.bias"]
    assert list(found.trainable()) == ["g.weight", "g.bias", "gg.weight", "gg.bias"]


def test_local_shares_the_memory() -> None:
    found = spread(lambda: nn.Linear(2, 2))
    found.local("weight").fill_(7.0)
    assert found.modules[""].weight.eq(7.0).all()  # type: ignore[operator]
    assert not found.local("weight").requires_grad


class Mixed(nn.Module):
    """Tensors of every kind, as a model that comes in bfloat16 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, dtype=torch.bfloat16)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("phase", torch.tensor([1.0 + 2.0j]))
        self.register_buffer("flags", torch.tensor([True]))


def test_parameters_get_the_precisions_type_and_that_is_said() -> None:
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)):
        found = spread(Mixed, precision=precision)
        kinds = {name: tensor.dtype for name, tensor in found.tensors.items()}
        assert kinds["linear.weight"] is dtype
        assert kinds["steps"] is torch.int64 and kinds["flags"] is torch.bool
        # A complex buffer loses half of itself where it is cast like a real one.
        assert found.tensors["phase"].imag.item() == 2.0
        said = [f"parameters are float32, because train.precision={precision}; model() made them bfloat16"]
        assert [str(decision) for decision in found.decisions] == (said if dtype is torch.float32 else [])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Complex, "parameter phase is complex64: make it real, and use torch.view_as_complex in forward"),
        (
            lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)),
            "0 has sparse gradients, which come with a later version: sparse=False",
        ),
    ],
)
def test_gradients_that_cannot_be_reduced_are_refused(build: Any, message: str) -> None:
    with pytest.raises(TaskError) as raised:
        spread(build)
    assert str(raised.value) == message
    spread(lambda: build().requires_grad_(False))


def test_frozen_batch_statistics_are_none() -> None:
    norm = nn.BatchNorm1d(2)
    assert has_batch_statistics({"": nn.Sequential(norm)})
    assert not has_batch_statistics({"": norm.eval(), "other": nn.GroupNorm(1, 2)})
    # Without running statistics evaluation looks at the batch too.
    assert has_batch_statistics({"": nn.BatchNorm1d(2, track_running_stats=False).eval()})


def refusal(build: Any, layout: Layout) -> str:
    """What a worker says to this."""
    try:
        spread(build, layout)
    except AllranksError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))


def shared_between_two() -> dict[str, nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.bias = first.bias
    return {"first": first, "second": second}


@pytest.mark.distributed
def test_what_cannot_be_spread_is_refused_on_every_rank(pool: Pools) -> None:
    refused = pool(2).run(refusal, batch_norm, Layout(dp_replicate=2))
    expected = (
        "LayoutError: 1 (BatchNorm, 2 in all) sees only its own rank's samples over 2 data-parallel ranks: "
        "synchronised statistics come with a later version; use --layout single, or GroupNorm"
    )
    assert refused == [expected] * 2
    assert pool(2).run(refusal, lambda: batch_norm().eval(), Layout(dp_shard=2)) == ["", ""]
    assert pool(2).run(refusal, shared_between_two, Layout(dp_replicate=2)) == ["", ""]
    refused = pool(2).run(refusal, shared_between_two, Layout(dp_shard=2))
    expected = (
        "LayoutError: second.bias is shared with model 'first', and layout dp_shard=2 cuts each model by itself: "
        "use --layout ddp or single"
    )
    assert refused == [expected] * 2


def look(kind: str, layout: Layout, options: dict[str, Any]) -> Any:
    found = spread(MODELS[kind], layout, **options)
    wrapped = {which: isinstance(module, DistributedDataParallel) for which, module in found.modules.items()}
    bare = not isinstance(found.bare(), DistributedDataParallel)
    return wrapped, bare, found.divisor, [str(decision) for decision in found.decisions]


@pytest.mark.distributed
def test_who_reduces_gradients(pool: Pools) -> None:
    assert pool(2).run(look, "mlp", Layout(dp_replicate=2), {})[0] == ({"": True}, True, 2, [])
    assert pool(2).run(look, "mlp", Layout(dp_replicate=2), {"ddp": False})[0] == ({"": False}, True, 2, [])
    units = "2 units and the root of the model are gathered one at a time, because"
    cut = pool(2).run(look, "sharing", Layout(dp_shard=2), {})[0]
    assert cut == ({"": False}, True, 2, [f"{units} these modules repeat: blocks.0+blocks.2, blocks.1"])
    hinted = pool(2).run(look, "sharing", Layout(dp_shard=2), {"blocks": ["first", "last"]})[0]
    assert hinted[3] == [f"{units} hints().blocks names them: first, last"]
    whole = pool(2).run(look, "tied", Layout(dp_shard=2), {"blocks": ["embedding"]})[0]
    assert whole[3] == ["the model is gathered as one unit, because no block stands apart from the rest"]


def accumulate(layout: Layout, num_micro_steps: int) -> dict[str, int]:
    """The collectives of one step of micro-steps, gradients included."""
    found = spread(MODELS["scalars"], layout)
    x = torch.ones(2, 5)
    with profile() as profiled:
        for micro_step in range(num_micro_steps):
            found.synchronise(last=micro_step == num_micro_steps - 1)
            found.modules[""](x).sum().backward()
        found.reduce_scalars()
    names = (event.name for event in profiled.events() or () if event.name.startswith("c10d::"))
    return dict(Counter(name.removeprefix("c10d::") for name in names))


@pytest.mark.distributed
def test_accumulation_does_not_synchronise_what_it_need_not(pool: Pools) -> None:
    units = 4  # three blocks and the root
    for layout in (Layout(dp_replicate=2), Layout(dp_replicate=2, sharding="none")):
        once, thrice = (pool(2).run(accumulate, layout, num)[0] for num in (1, 3))
        assert once == thrice
        assert once["allreduce_"] == (1 if layout.replicated else units + 1)  # + the scalars
    hybrid = Layout(dp_replicate=2, dp_shard=2)
    once, thrice = (pool(4).run(accumulate, hybrid, num)[0] for num in (1, 3))
    assert thrice["_reduce_scatter_base_"] == 3 * once["_reduce_scatter_base_"] == 3 * units
    assert thrice["allreduce_"] == once["allreduce_"] == units + 2  # + the scalars over both axes


def average() -> list[float | None]:
    """Rank r's scalars have gradients r + 1 and, on rank 1 only, 5."""
    found = spread(MODELS["scalars"], Layout(dp_shard=3))
    first, second = found._scalars
    first.grad = torch.tensor(float(dist.get_rank() + 1))
    second.grad = torch.tensor(5.0) if dist.get_rank() == 1 else None
    found.reduce_scalars()
    return [None if scalar.grad is None else scalar.grad.item() for scalar in (first, second)]


@pytest.mark.distributed
def test_scalars_are_averaged_over_all_ranks(pool: Pools) -> None:
    assert pool(3).run(average) == [[2.0, pytest.approx(5 / 3)]] * 3


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].eval()
    return model


def test_a_model_in_evaluation_mode_is_trained_in_training_mode_and_that_is_said() -> None:
    found = spread(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout()).eval(), training=True)
    assert all(member.training for member in found.modules[""].modules())
    (decision,) = found.decisions
    assert str(decision) == "the model is trained in training mode, because model() returned it in evaluation mode"
    of_several = spread(
        lambda: {"a": nn.Linear(3, 4).eval(), "b": nn.Linear(3, 4).eval().requires_grad_(False)}, training=True
    )
    assert of_several.modules["a"].training and not of_several.modules["b"].training, "what is frozen stays as it is"


def test_a_part_in_evaluation_mode_stays_so_and_so_does_a_loop_of_one_s_own() -> None:
    found = spread(partly_frozen, training=True)
    assert found.modules[""].training and not found.modules[""].get_submodule("1").training
    assert not found.decisions
    assert not spread(lambda: nn.Linear(3, 4).eval()).modules[""].training
