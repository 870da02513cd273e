"""A cut model that computes something else than the whole one is found before the first step."""

import importlib
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.hints import Hints, TensorStyle
from allranks.models.moe import Experts
from allranks.stepping.uncompared import UNCOMPARED
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import MODELS, Tiny

pytestmark = pytest.mark.distributed

whole_check: Any = importlib.import_module("allranks.stepping.whole_check")


class Heads(nn.Module):
    """Attention that splits its channels by a number of heads which it keeps: of a part it makes narrower heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.out = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) * torch.linspace(1, 2, 4, dtype=x.dtype).view(1, 4, 1)
        query, key = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key))
        mixed = functional.scaled_dot_product_attention(query, key, key)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2)).mean(1)
        return found


class Halves(nn.Module):
    """Drops a scale inside: right outputs, but a gradient of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.gain * torch.tanh(self.up(x)))
        return found


class Lora(nn.Module):
    """A pair of layers, and a low-rank one beside the first, whose second half begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)
        self.a, self.b = nn.Linear(5, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(x) + self.b(self.a(x))))
        return found


LORA: dict[str, TensorStyle] = {"up": "colwise", "b": "colwise", "down": "rowwise"}


class LoraTask(Tiny):
    ruled: bool = True

    def model(self) -> nn.Module:
        return Lora()

    def hints(self) -> Hints:
        return Hints(tensor=LORA | {"a": "replicate"} if self.ruled else LORA)


class Wrong(Tiny):
    which: str = "heads"

    def model(self) -> nn.Module:
        return Heads(2) if self.which == "heads" else Halves()

    def hints(self) -> Hints:
        if self.which == "heads":
            return Hints(tensor={"query": "colwise", "key": "colwise", "out": "rowwise"})
        return Hints(tensor={"up": "colwise", "down": "rowwise"})


def start(task: Any, layout: str, precision: str, *overrides: str) -> Any:
    """In a worker: the refusal, or what was decided."""
    try:
        config = config_of(layout, *overrides, precision=precision)
        return [str(decision) for decision in session_of(task, config).decisions]
    except LayoutError as error:
        return str(error)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,dp_replicate=2", "tp=2,dp_shard=2"])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_what_is_right_passes(pool: Pools, layout: str, precision: str) -> None:
    for kind in ("transformer", "scalars"):
        for found in pool(2 if layout == "tp=2" else 4).run(start, Tiny(kind=kind), layout, precision):
            assert any(said.startswith("the cut model computes what the whole one does") for said in found)


def test_under_bfloat16_the_bounds_are_wider(pool: Pools) -> None:
    found = pool(2).run(start, Tiny(kind="transformer"), "tp=2", "bfloat16")
    assert any("computes what the whole one does" in said for said in found[0])
    assert "does not compute" in pool(2).run(start, Wrong(which="gain"), "tp=2", "bfloat16")[0]


class Jitter(nn.Module):
    """Python's numbers inside of a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + random.random()


class Noisy(nn.Module):
    """Draws in every mode, between its layers or by them, as a diffusion model or a noisy router does."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        inside = Jitter() if source == "inside" else nn.Tanh()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(5, 8), inside, nn.Linear(8, 5)) for _ in range(5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hidden = x + noise
        for layer in self.layers:
            drawn = {"torch": lambda: torch.randn_like(hidden), "python": random.random, "inside": float}  # noqa: B023
            hidden = layer(hidden) + drawn[self.source]()
        found: torch.Tensor = self.head(hidden)
        return found


class NoisyTask(Tiny):
    source: str = "torch"

    def model(self) -> nn.Module:
        return Noisy(self.source)

    def inputs(self, batch: Any) -> Any:
        return {"x": batch["x"], "noise": torch.randn_like(batch["x"])}

    def hints(self) -> Hints:
        return Hints(blocks=("layers.*",))


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "pp=2,schedule=interleaved"])
def test_what_torch_draws_in_every_mode_is_compared_all_the_same(pool: Pools, layout: str) -> None:
    for found in pool(2).run(start, NoisyTask(), layout, "float64", "train.micro_steps=4"):
        assert any(said.startswith("the cut model computes what the whole one does") for said in found), found


def test_what_python_draws_between_modules_is_one_devices(pool: Pools) -> None:
    for found in pool(2).run(start, NoisyTask(source="python"), "pp=2", "float64"):
        assert any(said.startswith("the cut model computes what the whole one does") for said in found), found


def test_where_python_draws_in_a_module_it_is_not_compared_and_that_is_said(pool: Pools) -> None:
    for found in pool(2).run(start, NoisyTask(source="inside"), "pp=2", "float64"):
        assert any(said.startswith(f"{UNCOMPARED}, because it draws from python's or numpy's") for said in found), found


@pytest.mark.parametrize(("which", "name"), [("heads", "(query|key|out)"), ("gain", "gain")])
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,dp_shard=2"])
def test_what_looks_at_whole_tensors_is_found(pool: Pools, which: str, name: str, layout: str) -> None:
    found = pool(2 if layout == "tp=2" else 4).run(start, Wrong(which=which), layout, "float32")
    assert len(set(found)) == 1
    with pytest.raises(LayoutError, match=rf"the gradient of {name}.* is .*, and .* for the whole model"):
        raise LayoutError(found[0])


def test_what_begins_at_zero_hides_nothing(pool: Pools) -> None:
    """Without a rule `a` is taken for a module between the cut layers, because `up` has run before it."""
    found = pool(2).run(start, LoraTask(ruled=False), "tp=2", "float32")[0]
    assert "the gradient of a.weight is" in found
    right = pool(2).run(start, LoraTask(), "tp=2", "float32")[0]
    assert any("computes what the whole one does" in said for said in right)


class Averaging(Experts):
    """Experts that divide by how many there are: a part of them by fewer."""

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, tokens_per_expert) / len(tokens_per_expert)


class WrongExperts(Tiny):
    def model(self) -> nn.Module:
        model = MODELS["moe"]()
        model.get_submodule("layers.1.feed_forward").register_module("experts", Averaging(4, 48, 5))
        return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp_replicate=2,ep=2", "dp_shard=2,ep=2"])
def test_experts_are_compared_too(pool: Pools, layout: str, precision: str) -> None:
    for found in pool(2).run(start, Tiny(kind="moe"), layout, precision):
        assert any(said.startswith("the cut model computes what the whole one does") for said in found)
        assert any(said.startswith("each of ep=2 ranks holds 2 of 4 experts a layer, because") for said in found)
    found = pool(2).run(start, WrongExperts(kind="moe"), layout, precision)
    assert found[0] == found[1] and found[0].startswith(f"layout {layout} does not compute what one process computes")


class Several(Tiny):
    """With a step of its own."""

    def step(self, models: Any, batch: Any) -> Any:
        yield "", self.loss(models(batch["x"]), batch), 1


def test_what_is_not_compared_is_said(pool: Pools) -> None:
    said = pool(2).run(start, Several(kind="transformer"), "tp=2", "float32")[0]
    assert "the cut model was not compared with the whole one, because Several has a step() of its own" in said


def start_large() -> Any:
    with patch.object(whole_check, "LARGEST_FLOPS", 0.0):  # the worker lives on
        return start(Tiny(kind="transformer"), "tp=2", "float32")


def test_what_would_take_long_is_left_out_and_that_is_said(pool: Pools) -> None:
    found = pool(2).run(start_large)[0]
    assert any(said.startswith("the cut model was not compared with the whole one, because one") for said in found)


def start_counting(mine: float, rest: float) -> Any:
    """In a worker: rank 0 counts `mine` floating-point operations, the others `rest`."""
    start_check = importlib.import_module("allranks.stepping.start_check")
    count = mine if dist.get_rank() == 0 else rest
    with patch.object(start_check, "count_flops", lambda *_: count):
        return start(Tiny(kind="transformer"), "tp=2", "float32")


@pytest.mark.parametrize(("mine", "rest", "compared"), [(1e9, 1e15, True), (1e15, 1e9, False)])
def test_one_rank_decides_whether_it_would_take_long(pool: Pools, mine: float, rest: float, compared: bool) -> None:
    for found in pool(2).run(start_counting, mine, rest):
        assert any("computes what the whole one does" in said for said in found) == compared
        assert any("was not compared with the whole one" in said for said in found) != compared


def start_where_a_processor_cannot(elsewhere: bool) -> Any:
    """In a worker: the whole model raises on rank 0, as what is made for GPUs alone does."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no backward on CPU\nand more")

    with patch.object(whole_check, "_whole", refuse), patch.object(whole_check, "is_gpu", lambda _: elsewhere):
        if elsewhere or dist.get_rank() == 0:
            return start(Tiny(kind="transformer"), "tp=2", "float32")


def test_what_a_processor_cannot_run_is_not_compared_and_no_rank_waits(pool: Pools) -> None:
    found = pool(2).run(start_where_a_processor_cannot, True)
    for said, why in zip(found, (" (NotImplementedError: no backward on CPU)", ""), strict=True):
        line = (
            "the cut model was not compared with the whole one, because rank 0's processor cannot run the whole model"
        )
        assert line + why in said


def test_a_run_on_processors_leaves_no_error_of_the_whole_model_out() -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no backward on CPU\nand more")

    def tried(device: str) -> Any:
        forward = SimpleNamespace(spread=SimpleNamespace(device=torch.device(device)))
        with patch.object(whole_check, "_whole", refuse):
            return whole_check._try_whole(forward, None, 0)

    assert tried("cuda:1") == "NotImplementedError: no backward on CPU"
    with pytest.raises(NotImplementedError):
        tried("cpu")


def start_uncounted(largest: float) -> Any:
    start_check = importlib.import_module("allranks.stepping.start_check")
    with (
        patch.object(start_check, "count_flops", lambda *_: None),
        patch.object(whole_check, "LARGEST_UNCOUNTED", largest),
    ):
        return start(Tiny(kind="transformer"), "tp=2", "float32")


@pytest.mark.parametrize(("largest", "compared"), [(1e8, True), (10.0, False)])
def test_of_a_large_model_that_cannot_be_counted_nothing_is_compared(
    pool: Pools, largest: float, compared: bool
) -> None:
    for found in pool(2).run(start_uncounted, largest):
        assert any("computes what the whole one does" in said for said in found) == compared
        assert any("could not be counted, and the model is large" in said for said in found) != compared


class OnDevice(torch.Tensor):
    """A tensor that no processor can read until it was brought there."""

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("as_subclass", "__get__", "__set__"):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def start_on_a_device() -> Any:
    real = whole_check._whole

    def brought(forward: Any, batch: Any, seed: int) -> Any:
        return real(forward, {name: part.as_subclass(OnDevice) for name, part in batch.items()}, seed)

    with patch.object(whole_check, "_whole", brought):
        return start(Tiny(kind="transformer"), "tp=2", "float32")


def test_a_batch_that_lies_on_a_device_is_brought_to_the_processor(pool: Pools) -> None:
    for found in pool(2).run(start_on_a_device):
        assert any("computes what the whole one does" in said for said in found)


class Beside(nn.Module):
    """A frozen layer's output reaches every block; `around`: what the first one makes is used beside them, too."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.blocks = nn.ModuleList(Joins() for _ in range(4))
        self.out = nn.Linear(5, 3)
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.frozen(x)
        near = memory > 0
        for block in self.blocks:
            x = block(x, memory, near)
            if self.around:
                x = x + memory
        found: torch.Tensor = self.out(x)
        return found


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x + memory)) * near


class BesideTask(Tiny):
    around: bool = False

    def model(self) -> nn.Module:
        return Beside(around=self.around)


def start_both(layout: str, largest: float) -> list[Any]:
    """In a worker: a model that can be cut and one that cannot."""
    with patch.object(whole_check, "LARGEST_FLOPS", largest):
        return [start(BesideTask(around=around), layout, "float64") for around in (False, True)]


@pytest.mark.parametrize("largest", [0.0, pytest.param(1e12, marks=pytest.mark.full)], ids=["large", "small"])
def test_a_stage_that_uses_what_only_another_one_has_is_refused_however_large(pool: Pools, largest: float) -> None:
    for right, wrong in pool(2).run(start_both, "pp=2", largest):
        assert any("not compared" in said if not largest else "computes what the whole" in said for said in right)
        assert largest or any("write in place into lists or objects" in said for said in right)
        assert wrong.startswith("layout pp=2 does not compute what one process computes: ")
        assert "test_whole_check.py:" in wrong and "uses a tensor of an earlier stage beside the blocks (add)" in wrong
        assert "hints().split_before" in wrong
