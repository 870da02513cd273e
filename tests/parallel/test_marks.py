"""Attributes of parameters go along into every layout; hooks act on whole gradients or are refused."""

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.initial import Placer, Source, build_modules
from allranks.parallel.marks import check_hooks, give_marks, note_marks
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread

TWO = {
    "ddp": Layout(dp_replicate=2),
    "zero-1": Layout(dp_shard=2, sharding="optimizer"),
    "fsdp": Layout(dp_shard=2),
    "tp": Layout(tp=2),
    "pp": Layout(pp=2),
}


def marked() -> nn.Module:
    """Biases are marked, as those do who give them no weight decay."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.no_decay = True  # type: ignore[attr-defined]
    return model


def names_of_marked(layout: Layout) -> tuple[list[str], list[str]]:
    """In a worker: what has a mark, of the model's parameters and of those that an optimizer is given."""
    found = spread(marked, layout)
    of_model = [name for name, tensor in found.trainable().items() if hasattr(tensor, "no_decay")]
    return of_model, [name for name, tensor in found.updatable().items() if hasattr(tensor, "no_decay")]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", TWO.values(), ids=TWO)
def test_marks_are_there_under_every_layout(layout: Layout, pool: Pools) -> None:
    ranks = pool(2).run(names_of_marked, layout)
    biases = {name for name, _ in marked().named_parameters() if name.endswith("bias")}
    for of_model, of_optimizer in ranks:
        assert of_model == of_optimizer
    assert {name for of_model, _ in ranks for name in of_model} == biases
    if layout.pp == 1:
        assert all(set(of_model) == biases for of_model, _ in ranks)


class Reading(nn.Module):
    """Its forward reads the attributes of its parameters, one of which is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReadingLayer(index) for index in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ReadingLayer(nn.Linear):
    """Pruned by a mask on its weight."""

    def __init__(self, index: int) -> None:
        super().__init__(4, 4)
        self.weight.mask = (torch.arange(16).view(4, 4) % 3 > index).float()  # type: ignore[attr-defined]
        if index:
            self.bias.flag = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = nn.functional.linear(x, self.weight * self.weight.mask, self.bias)  # type: ignore[attr-defined]
        return found * 2 if getattr(self.bias, "flag", False) else found


def read_marks(layout: Layout | None) -> list[torch.Tensor]:
    """What two forwards give, and one without gradients between them."""
    found = spread(Reading) if layout is None else spread(Reading, layout)
    model, outputs = found.modules[""], []
    for number in range(3):
        with torch.set_grad_enabled(number != 1):
            outputs.append(model(torch.ones(2, 4) * number))
        if number != 1:
            outputs[-1].sum().backward()
    return [output.detach() for output in outputs]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [TWO["fsdp"], Layout(dp_shard=2, gather="bfloat16")], ids=["fsdp", "bfloat16"])
def test_a_forward_reads_marks_of_gathered_parameters(layout: Layout, pool: Pools) -> None:
    expected = read_marks(None)
    assert not torch.equal(expected[0], expected[2])
    for found in pool(2).run(read_marks, layout):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.02)


def masked() -> nn.Module:
    first, last = nn.Linear(4, 8), nn.Linear(8, 4)
    first.weight.register_hook(lambda gradient: gradient * 0.0)
    return nn.Sequential(first, nn.ReLU(), last)


def counted() -> nn.Module:
    first, last = nn.Linear(4, 8), nn.Linear(8, 4)
    last.bias.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return nn.Sequential(first, nn.ReLU(), last)


HOOKED = {"hook": (masked, "0.weight"), "post-accumulate": (counted, "2.bias")}


def frozen(kind: str) -> nn.Module:
    """The same, frozen after it got its hook."""
    return HOOKED[kind][0]().requires_grad_(False)


@pytest.mark.parametrize("kind", HOOKED)
def test_a_hook_on_what_is_frozen_is_no_reason_to_refuse(kind: str) -> None:
    check_hooks("", frozen(kind), TWO["ddp"])
    model = frozen(kind)
    model.get_parameter(HOOKED[kind][1]).requires_grad_()
    with pytest.raises(LayoutError, match=f"has put a gradient hook on {HOOKED[kind][1]}"):
        check_hooks("", model, TWO["ddp"])


@pytest.mark.parametrize("kind", HOOKED)
def test_a_hook_on_what_is_frozen_stays_for_the_day_on_which_it_is_trained(kind: str) -> None:
    with torch.device("meta"):
        model = frozen(kind)
    Placer(torch.device("cpu"), Source()).place(model)
    parameter = model.get_parameter(HOOKED[kind][1])
    assert not any(one.requires_grad for one in model.parameters())
    nn.init.ones_(parameter.requires_grad_())
    parameter.sum().backward()
    assert parameter.grad is None or not parameter.grad.any()


def refusal(kind: str, layout: Layout) -> str:
    """In a worker: what is said of a model with a hook."""
    try:
        spread(HOOKED[kind][0], layout)
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("kind", HOOKED)
@pytest.mark.parametrize("layout", [TWO["ddp"], TWO["fsdp"], TWO["tp"]], ids=["ddp", "fsdp", "tp"])
def test_a_hook_on_a_parameter_is_refused_by_name_on_every_rank(layout: Layout, kind: str, pool: Pools) -> None:
    for said in pool(2).run(refusal, kind, layout):
        assert said.startswith(f"model() has put a gradient hook on {HOOKED[kind][1]}, which would act on what each of")


@pytest.mark.parametrize("kind", HOOKED)
def test_alone_a_hook_acts_as_it_is(kind: str) -> None:
    build, name = HOOKED[kind]
    found = spread(build)
    found.modules[""](torch.ones(2, 4)).sum().backward()
    gradient = found.tensors[name].grad
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize("kind", HOOKED)
def test_a_hook_follows_a_parameter_to_its_place(kind: str) -> None:
    """As on a GPU, where every parameter is moved: here from a device without memory."""
    with torch.device("meta"):
        model = HOOKED[kind][0]()
    Placer(torch.device("cpu"), Source()).place(model)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model(torch.ones(2, 4)).sum().backward()
    found = dict(model.named_parameters())
    gradient, untouched = found[HOOKED[kind][1]].grad, found["0.bias"].grad
    assert untouched is not None and untouched.any()
    assert gradient is None or not gradient.any()


def with_tensor() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.mask = torch.ones(3, 3)  # type: ignore[attr-defined]
    return model


def test_a_tensor_on_a_parameter_is_built_on_every_rank() -> None:
    modules, decisions = build_modules(with_tensor, Source(leads=False), lambda: None)
    assert not modules[""].weight.mask.is_meta  # type: ignore[union-attr]
    assert decisions[0].because.startswith("weight.mask is a tensor and neither parameter nor buffer")


def test_only_plain_parameters_have_marks() -> None:
    """The attributes of a tensor subclass are its own working."""
    plain, own = nn.Linear(2, 2), nn.Linear(2, 2)

    class Own(nn.Parameter):
        pass

    own.weight = Own(torch.ones(2, 2))
    plain.weight.kept = own.weight.kept = 3  # type: ignore[attr-defined]
    marks = note_marks({"a": plain, "b": own})
    assert marks == {"a.weight": {"kept": 3}}
    elsewhere = {"a.weight": nn.Parameter(torch.ones(1)), "c": nn.Parameter(torch.ones(1))}
    give_marks(marks, elsewhere)
    assert vars(elsewhere["a.weight"]) == {"kept": 3} and not vars(elsewhere["c"])
