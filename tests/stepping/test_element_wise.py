"""What an optimizer's update looks at is found by trying it, and refused where processes have parts."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

from allranks.errors import TaskError
from allranks.layout import Layout
from allranks.parameter_map import Box, Entry
from allranks.stepping.element_wise import KNOWN, check_scopes, find_scope
from allranks.stepping.optimizer import Optimizers
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread

Update = Callable[[list[nn.Parameter]], list[torch.Tensor]]


class Made(Optimizer):
    """Moves parameters by what a function of them, with their gradients, says."""

    def __init__(self, parameters: Any, update: Update, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.update = update
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for parameter, moved in zip(group["params"], self.update(group["params"]), strict=True):
                self.state[parameter]["seen"] = torch.ones(())
                parameter.sub_(group["lr"] * moved)


def gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def signs(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Lion's, without its average."""
    return [gradient.sign() for gradient in gradients(parameters)]


def trust(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """LAMB's and LARS's ratio of norms."""
    return [p.norm() / g.norm() * g for p, g in zip(parameters, gradients(parameters), strict=True)]


class Lamb(Made):
    """With that ratio alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, trust)


def together(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """A gradient over the norm of all, as Prodigy and clipping inside an optimizer look at it."""
    found = gradients(parameters)
    norm = torch.stack([gradient.norm() for gradient in found]).norm()
    return [gradient / norm for gradient in found]


def noise(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.randn_like(gradient) for gradient in gradients(parameters)]


def nothing(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.zeros_like(gradient) for gradient in gradients(parameters)]


def fails(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    raise RuntimeError("only on Sundays")


class Wrapper(Optimizer):
    """Steps another one, as Lookahead and SAM do."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Several(Optimizer):
    """Steps others that are in what `hold` makes of them."""

    def __init__(self, inner: list[Optimizer], hold: Callable[[list[Optimizer]], Any]) -> None:
        super().__init__([group for one in inner for group in one.param_groups], {})
        self.inner, self.held = len(inner), hold(inner)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.held if not isinstance(self.held, dict) else self.held["all"][0]:
            one.step()


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(8, 4))]


@pytest.mark.parametrize(
    ("make", "scope", "unknown"),
    [
        (AdamW, "element", ""),
        (lambda p: Made(p, signs), "element", ""),
        (lambda p: Made(p, signs, lr=0.0), "element", ""),
        (lambda p: Made(p, trust), "tensor", ""),
        (torch.optim.Muon, "tensor", ""),
        (torch.optim.Adafactor, "tensor", ""),
        (lambda p: Made(p, together), "model", ""),
        (lambda p: Made(p, noise), "element", "it draws random numbers"),
        (lambda p: Made(p, nothing), "element", "it did not move small tensors"),
        (lambda p: Made(p, fails), "element", "trying it on small tensors raised RuntimeError: only on Sundays"),
        (torch.optim.LBFGS, "element", "trying it on small tensors raised TypeError"),
        (lambda p: Wrapper(Made(p, trust)), "tensor", "it steps another optimizer, and only that one was tried"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_update_looks_at(make: Callable[[Any], Optimizer], scope: str, unknown: str) -> None:
    found, because = find_scope(make(parameters()))
    assert found == scope
    assert because.startswith(unknown) if unknown else because == ""


@pytest.mark.parametrize("kind", sorted(KNOWN, key=str), ids=str)
def test_torchs_own_that_are_not_tried_are_what_they_are_taken_for(kind: Any) -> None:
    """A subclass is tried."""
    if kind is torch.optim.Adagrad and torch.__version__ < "2.13":
        pytest.skip("that of torch 2.11 makes its state where it is made, and a copy without state cannot be tried")
    assert find_scope(type(f"My{kind.__name__}", (kind,), {})(parameters())) == ("element", "")


class Grouped(Optimizer):
    """Updates each group in its own way."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter, moved in zip(group["params"], group["update"](group["params"]), strict=True):
                parameter.sub_(group["lr"] * moved)


@pytest.mark.parametrize(
    ("updates", "scope", "unknown"),
    [
        ((signs, signs), "element", ""),
        ((signs, trust), "tensor", ""),
        ((together, trust), "model", ""),
        ((fails, trust), "tensor", "trying it on small tensors raised RuntimeError: only on Sundays"),
        ((noise, trust), "tensor", "it draws random numbers, so that two equal updates differ"),
        (
            (nothing, fails, fails, signs),
            "element",
            "it did not move small tensors; trying it on small tensors raised RuntimeError: only on Sundays",
        ),
    ],
)
def test_every_group_is_tried_with_its_own_settings(updates: tuple[Update, ...], scope: str, unknown: str) -> None:
    """What cannot be tried says nothing of the groups behind it."""
    held = [{"params": [nn.Parameter(torch.ones(4, 4))], "update": update} for update in updates]
    assert find_scope(Grouped(held)) == (scope, unknown)


def test_a_group_without_parameters_is_none() -> None:
    empty = {"params": [], "update": trust}
    assert find_scope(Grouped([empty, {"params": parameters(), "update": signs}])) == ("element", "")
    assert find_scope(Grouped([empty, {"params": parameters(), "update": trust}])) == ("tensor", "")


class Counting(Made):
    """Counts in tensors, of its own and of its groups, and holds parameters besides the groups."""

    def __init__(self, parameters: Any) -> None:
        held = list(parameters)
        super().__init__([{"params": [one], "counts": [torch.zeros(())]} for one in held], signs)
        self.count = torch.zeros(())
        self.again = self.count
        self.counts = {"all": [torch.zeros(())], "pair": (torch.zeros(()), 1), "queue": deque([torch.zeros(())])}
        self.held, self.called = held, {one: "name" for one in held}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        before = self.count.clone()
        counts: dict[str, Any] = self.counts
        contained = counts["all"][0], counts["pair"][0], counts["queue"][0], self.param_groups[0]["counts"][0]
        for count in (self.count, *contained):
            count.add_(1)
        assert self.again == before + 1, "what was one tensor is two"
        for parameter in (*self.held, *self.called):
            parameter.add_(1)


def test_the_trial_counts_nothing_in_the_real_one() -> None:
    held = parameters()
    before = [p.detach().clone() for p in held]
    optimizer = Counting(held)
    assert find_scope(optimizer) == ("element", "")
    counts: dict[str, Any] = optimizer.counts
    tensors = [optimizer.count, counts["all"][0], counts["pair"][0], counts["queue"][0]]
    assert not any([*tensors, *(group["counts"][0] for group in optimizer.param_groups)])
    assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))


@pytest.mark.parametrize(
    "hold", [list, tuple, lambda inner: {"all": [inner]}], ids=["list", "tuple", "dict with a list"]
)
def test_optimizers_in_containers_are_not_stepped(hold: Callable[[list[Optimizer]], Any]) -> None:
    held = parameters()
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in held]
    inner = [SGD(held[:1], lr=0.1), Lamb(held[1:])]
    for one in inner:
        one.register_step_post_hook(lambda *_: pytest.fail("the user's hook has run"))
    said = "it steps another optimizer, and only that one was tried"
    assert find_scope(Several(inner, hold)) == ("tensor", said)
    assert find_scope(Several(inner[:1], hold)) == ("element", said)
    assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))


def test_optimizers_that_hold_each_other_end_the_search() -> None:
    inner = Made(parameters(), trust)
    outer = Wrapper(inner)
    inner.outer = outer  # type: ignore[attr-defined]
    assert find_scope(outer) == ("element", "it steps another optimizer, and only that one was tried")


def test_small_tensors_are_on_the_processor_whatever_the_default_is() -> None:
    optimizer = Made(parameters(), trust)
    with torch.device("meta"):
        assert find_scope(optimizer) == ("tensor", "")


def test_a_compiled_update_is_tried_as_it_is_written() -> None:
    """Nor is what the user compiled forgotten: a stance is left behind as it was."""

    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled for small tensors")

    compiled = torch.compile(lambda one: one / one.norm(), backend=refuse)
    assert find_scope(Made(parameters(), lambda p: [compiled(one) for one in gradients(p)])) == ("tensor", "")


def test_a_group_of_whole_matrices_beside_one_of_parts_is_right() -> None:
    """Muon on matrices that are whole, and AdamW on an embedding that tp cuts, in one object."""
    whole, part = parameters()
    entries = {id(whole): WHOLE, id(part): CUT}
    right = Grouped([{"params": [whole], "update": trust}, {"params": [part], "update": signs}])
    assert check_scopes({"": right}, entries, Layout(tp=2)) == ()
    wrong = Grouped([{"params": [whole], "update": signs}, {"params": [part], "update": trust}])
    with pytest.raises(TaskError, match=r"Grouped looks at whole matrices .* a part of layer\.weight"):
        check_scopes({"": wrong}, entries, Layout(tp=2))
    apart = Made([{"params": [whole]}, {"params": [part]}], together)
    with pytest.raises(TaskError, match="Made looks at all parameters together"):
        check_scopes({"": apart}, entries, Layout(tp=2))


def test_the_trial_leaves_everything_as_it_is() -> None:
    held = parameters()
    optimizer = Made(held, signs)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the user's hook has run"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    before, drawn = [p.detach().clone() for p in held], torch.get_rng_state()
    count = optimizer.steps
    assert find_scope(optimizer) == ("element", "")
    assert find_scope(Made(held, noise))[1]
    assert all(torch.equal(one, other) for one, other in zip(before, held, strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    assert not optimizer.state and optimizer.steps == count and optimizer.param_groups[0]["params"][0] is held[0]


def entry_of(shape: tuple[int, ...], box: tuple[int, ...], placements: Mapping[str, str]) -> Entry:
    return Entry(
        name="layer.weight",
        shape=shape,
        dtype="float32",
        box=Box((0,) * len(box), box),
        holders=(0,),
        kind="parameter",
        placements=dict(placements),
        alias_of=None,
        trainable=True,
        unit="",
        stage=0,
        persistent=True,
    )


WHOLE = entry_of((4, 4), (4, 4), {})
CUT = entry_of((4, 8), (4, 4), {"tp": "shard(1)"})


@pytest.mark.parametrize(
    ("update", "entry", "layout", "words"),
    [
        (trust, CUT, Layout(tp=2), r"Made looks at whole matrices .* layout tp=2 leaves each process a part of layer"),
        (together, CUT, Layout(tp=2), "Made looks at all parameters together"),
        (together, WHOLE, Layout(pp=2), "pp=2 leaves each process some of them"),
        (trust, WHOLE, Layout(pp=2), ""),
        (trust, WHOLE, Layout(dp_replicate=2), ""),
        (together, WHOLE, Layout(dp_replicate=2), ""),
        (signs, CUT, Layout(tp=2), ""),
    ],
)
def test_what_would_differ_is_refused(update: Update, entry: Entry, layout: Layout, words: str) -> None:
    (parameter,) = held = [nn.Parameter(torch.ones(4, 4))]
    optimizers = {"": Made(held, update)}
    if words:
        with pytest.raises(TaskError, match=words):
            check_scopes(optimizers, {id(parameter): entry}, layout)
    else:
        assert check_scopes(optimizers, {id(parameter): entry}, layout) == ()


@pytest.mark.parametrize("order", [1, -1])
def test_one_group_that_is_cut_is_enough(order: int) -> None:
    whole, cut = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    groups = [{"params": [whole], "update": fails}, {"params": [cut], "update": trust}][::order]
    with pytest.raises(TaskError, match=r"Grouped looks at whole matrices .* a part of layer\.weight"):
        check_scopes({"": Grouped(groups)}, {id(whole): WHOLE, id(cut): CUT}, Layout(tp=2))


def test_what_cannot_be_told_is_said() -> None:
    (parameter,) = held = [nn.Parameter(torch.ones(4, 4))]
    (said,) = check_scopes({"main": Made(held, fails)}, {id(parameter): CUT}, Layout(tp=2))
    assert said.what == "Made (main) is taken to update each element by itself, as the layout needs"
    assert said.because.endswith("RuntimeError: only on Sundays")
    assert check_scopes({"main": Made(held, fails)}, {id(parameter): WHOLE}, Layout(dp_shard=2)) == ()


def refusal(kind: Any, layout: Layout) -> str:
    """In a worker: what is said before the first update."""
    found = spread(lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False)), layout)
    try:
        Optimizers(found, {"": kind(list(found.updatable().values()))})
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, SGD])
def test_a_real_one_over_real_parts(kind: Any, pool: Pools) -> None:
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)):
        assert pool(2).run(refusal, kind, layout) == ["", ""]
    for layout in (Layout(tp=2), Layout(dp_shard=2, sharding="optimizer")):
        said = "" if kind is SGD else f"{kind.__name__} looks at whole matrices"
        assert all(found.startswith(said) and bool(found) == bool(said) for found in pool(2).run(refusal, kind, layout))


def updated(kind: Any, layout: Layout) -> list[torch.Tensor]:
    """In a worker: parameters after an update with gradients that depend on the place in the whole."""
    found = spread(lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False)), layout)
    held: Any = list(found.updatable().values())
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in held]
    for parameter, values in zip(held, whole, strict=True):
        gradient = torch.arange(values.numel(), dtype=values.dtype).view_as(values).sin()
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    Optimizers(found, {"": kind(held)}).update("")
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach() for one in held]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [torch.optim.Muon, Lamb])
def test_parts_that_know_the_whole_are_updated_as_the_whole(kind: Any, pool: Pools) -> None:
    """FSDP2's: norms and products of DTensors are those of the whole."""
    alone = updated(kind, Layout())
    for found in pool(2).run(updated, kind, Layout(dp_shard=2)):
        for one, other in zip(found, alone, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
