"""What is asked of the user's modules before they are spread."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import AllranksError, TaskError
from allranks.layout import Layout
from allranks.parallel.checks import cast
from allranks.parallel.precision import choose_precision
from allranks.profiling.fakes import build_fake, fake_mode
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread


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


class Tied(Mixed):
    """The same, and two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(2, 2, bias=False)
        self.again.weight = self.linear.weight
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "dtype"), [("float32", torch.float32), ("float64", torch.float64)])
def test_tensors_without_memory_get_it_too(name: str, dtype: torch.dtype) -> None:
    module, _ = build_fake(Tied, fake_mode())
    assert isinstance(module, Tied)
    cast(module, choose_precision(name, None, "cpu"), [])
    weight = module.linear.weight
    assert weight is module.again.weight and isinstance(weight, nn.Parameter) and weight.requires_grad
    kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert {kinds.pop(name) for name in ("phase", "flags", "steps")} == {torch.complex64, torch.bool, torch.int64}
    assert set(kinds.values()) == {dtype} and weight.untyped_storage().nbytes() == 4 * dtype.itemsize


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
            "0 has sparse gradients, which no layout here reduces: sparse=False",
        ),
    ],
)
def test_gradients_that_cannot_be_reduced_are_refused(build: Any, message: str) -> None:
    with pytest.raises(TaskError) as raised:
        spread(build)
    assert str(raised.value) == message
    spread(lambda: build().requires_grad_(False))


@pytest.mark.parametrize(
    ("build", "name"), [(lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight"), (nn.LazyBatchNorm1d, "weight")]
)
def test_a_lazy_module_is_refused_until_it_knows_its_shapes(build: Any, name: str) -> None:
    with pytest.raises(TaskError, match=f"^{name} has no shape yet, for it belongs to a lazy module: call the model"):
        spread(build)


def test_a_lazy_module_that_was_called_is_none() -> None:
    module = nn.Sequential(nn.LazyLinear(2))
    module(torch.zeros(1, 3))
    spread(lambda: module)


def refusal(build: Any, layout: Layout) -> str:
    """What a worker says to this."""
    try:
        spread(build, layout)
    except AllranksError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shared_between_two() -> dict[str, nn.Module]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.bias = first.bias
    return {"first": first, "second": second}


@pytest.mark.distributed
def test_what_cannot_be_spread_is_refused_on_every_rank(pool: Pools) -> None:
    assert pool(2).run(refusal, shared_between_two, Layout(dp_replicate=2)) == ["", ""]
    refused = pool(2).run(refusal, shared_between_two, Layout(dp_shard=2))
    expected = (
        "LayoutError: second.bias is shared with model 'first', and layout dp_shard=2 cuts each model by itself: "
        "use --layout ddp or single"
    )
    assert refused == [expected] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(("key", "value"), [("max_norm", 1.0), ("scale_grad_by_freq", True)])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_look_at_a_rank_s_own_samples_are_refused_where_ranks_have_others(
    pool: Pools, kind: type[nn.Module], key: str, value: Any
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(kind(4, 2, **{key: value}), nn.Linear(2, 2))

    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)):
        told = pool(2).run(refusal, build, layout)
        assert all(one.startswith(f"LayoutError: 0 has {key}, which ") for one in told), told
    assert pool(1).run(refusal, build, Layout()) == [""]


def tied(*, pairs: int = 1, **options: Any) -> nn.Module:
    """An embedding that is the last layer, too, around blocks."""
    model = nn.Sequential(nn.Embedding(4, 2, **options), *(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 4))
    if pairs:
        model[5].weight = model[0].weight
    return model


@pytest.mark.distributed
def test_a_tied_table_that_one_stage_rescales_is_refused(pool: Pools) -> None:
    """The copy of the last stage would keep rows that the first has made shorter."""
    layout = Layout(pp=2)
    for one in pool(2).run(refusal, lambda: tied(max_norm=1.0), layout):
        assert one.startswith(
            "LayoutError: 0 has max_norm, which rescales rows in forward, and shares its weight with 5"
        )
    for build in (tied, lambda: tied(pairs=0, max_norm=1.0)):
        assert pool(2).run(refusal, build, layout) == [""] * 2


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
