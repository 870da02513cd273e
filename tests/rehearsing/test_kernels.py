"""What a kernel refuses for its types alone is found before it runs, and nothing else is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.errors import TaskError
from allranks.profiling.fakes import run_kernel
from allranks.rehearsing import kernels as module
from allranks.rehearsing.kernels import Kernels
from tests.rehearsing.tasks import Calling, Experts, Layered, rehearsed

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
I16, I32, I64 = torch.int16, torch.int32, torch.int64


class Asking(TorchDispatchMode):
    """Asks before each operator, as the rehearsal does."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._kernels.check(func._schema.name, func, args, kwargs or {})
        return run_kernel(func, args, kwargs or {})


def ask(call: Callable[..., Any], *given: Any, on_cuda: bool = False, kernels: Kernels | None = None) -> None:
    """Make the call on shapes alone."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
    with mode, Asking(kernels or Kernels(on_cuda=on_cuda)):
        call(*fake)


def of(kind: torch.dtype, *sizes: int) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(sizes, dtype=kind)


def norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Over channels in groups."""
    functional.group_norm(x, 4, weight, weight)


def batch_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Without statistics."""
    functional.batch_norm(x, None, None, weight, weight, training=True)


def volume(x: torch.Tensor, grid: torch.Tensor) -> None:
    """Samples of a picture or of a volume."""
    functional.grid_sample(x, grid, align_corners=False)


def bags(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Weighted sums of an embedding's rows."""
    functional.embedding_bag(of(I64, 5, 6), weight, mode="sum", per_sample_weights=scale)


def search(row: torch.Tensor, sorter: torch.Tensor) -> None:
    """In a row that a permutation sorts."""
    torch.searchsorted(row, row, sorter=sorter)


def huber(x: torch.Tensor, y: torch.Tensor) -> None:
    """Its backward alone."""
    torch.ops.aten.huber_loss_backward(x, x, y, 1, 1.0)


def masked(x: torch.Tensor, values: torch.Tensor) -> None:
    """Added where a mask lets it."""
    torch.ops.aten._unsafe_masked_index_put_accumulate(x, of(torch.bool, 7), [of(I64, 7)], values)


def softmax(gradient: torch.Tensor, output: torch.Tensor) -> None:
    """Its backward alone."""
    torch.ops.aten._softmax_backward_data(gradient, output, 1, gradient.dtype)


def scores(output: torch.Tensor, target: torch.Tensor) -> None:
    """Cross-entropy with and without a picture's dims."""
    functional.cross_entropy(output, target)


Case = tuple[str, Callable[..., Any], tuple[Any, ...], tuple[torch.dtype, ...]]
MIXES: list[Case] = [
    ("mv", torch.mv, (of(F32, 7, 5), of(F64, 5)), (F32,)),
    ("addmv", torch.addmv, (of(F32, 7), of(F32, 7, 5), of(BF16, 5)), (F32,)),
    ("addbmm", torch.addbmm, (of(F64, 7, 6), of(F32, 8, 7, 5), of(F32, 8, 5, 6)), (F64,)),
    ("_cdist_forward", torch.cdist, (of(F32, 7, 5), of(F64, 7, 5)), (F32,)),
    ("_euclidean_dist", torch.cdist, (of(F32, 30, 5), of(F64, 30, 5)), (F32,)),
    ("native_layer_norm", lambda x, w: functional.layer_norm(x, (5,), w), (of(F64, 7, 5), of(F32, 5)), (F64,)),
    ("native_group_norm", norm, (of(F64, 7, 8, 5, 5), of(F32, 8)), (F64,)),
    ("native_batch_norm", batch_norm, (of(F64, 7, 8), of(F32, 8)), (F64,)),
    ("index_put_", torch.Tensor.index_put_, (of(F32, 7, 5), (of(I64, 4),), of(BF16, 4, 5)), (F32, I64)),
    ("_unsafe_masked_index_put_accumulate", masked, (of(F64, 5), of(F32, 7)), (F64, torch.bool, I64)),
    ("put", torch.put, (of(F32, 7, 5), of(I32, 4), of(F32, 4)), (F32, I64)),
    ("index_add", torch.index_add, (of(F32, 7, 5), 0, of(I64, 4), of(BF16, 4, 5)), (F32, I64)),
    ("index_copy", torch.index_copy, (of(F32, 7, 5), 0, of(I32, 4), of(F32, 4, 5)), (F32, I64)),
    ("index_copy", torch.index_copy, (of(F32, 7, 5), 0, of(I32, 4), of(F64, 4, 5)), (F32, I64)),
    (
        "index_reduce",
        lambda x, i, y: x.index_reduce(0, i, y, "amax"),
        (of(F32, 7, 5), of(I64, 4), of(F64, 4, 5)),
        (F32, I64),
    ),
    ("index_fill", lambda x, i: x.index_fill(0, i, 1.0), (of(F32, 7, 5), of(I32, 4)), (F32, I64)),
    ("index_select", torch.index_select, (of(F32, 7, 5), 0, of(I16, 4)), (F32, I64)),
    ("searchsorted", search, (of(F32, 5), of(I32, 5)), (F32, I64)),
    ("nll_loss_forward", scores, (of(F32, 7, 5), of(I32, 7)), (F32, I64)),
    ("nll_loss2d_forward", scores, (of(F32, 7, 5, 4), of(I32, 7, 4)), (F32, I64)),
    ("binary_cross_entropy", functional.binary_cross_entropy, (of(F32, 7), of(I64, 7)), (F32,)),
    ("huber_loss_backward", huber, (of(F32, 7), of(F64, 7)), (F32,)),
    ("multi_margin_loss", functional.multi_margin_loss, (of(F32, 7, 5), of(I32, 7)), (F32, I64)),
    (
        "multilabel_margin_loss_forward",
        functional.multilabel_margin_loss,
        (of(F32, 7, 5), of(I32, 7, 5)),
        (F32, I64),
    ),
    ("_embedding_bag_forward_only", bags, (of(F32, 9, 4), of(F64, 5, 6)), (F32, I64)),
    ("complex", torch.complex, (of(F32, 7), of(F64, 7)), (F32,)),
    ("polar", torch.polar, (of(F32, 7), of(F64, 7)), (F32,)),
    ("heaviside", torch.heaviside, (of(F32, 7), of(F64, 7)), (F32,)),
]

ON_PROCESSORS: list[Case] = [
    ("linalg_cross", torch.linalg.cross, (of(F32, 7, 3), of(F64, 7, 3)), (F32,)),
    ("grid_sampler_2d", volume, (of(F32, 2, 3, 4, 5), of(F64, 2, 6, 6, 2)), (F32,)),
    ("grid_sampler_3d", volume, (of(F32, 2, 3, 4, 5, 5), of(F64, 2, 6, 6, 6, 3)), (F32,)),
    ("index_put", torch.index_put, (of(F32, 7, 5), (of(I64, 4),), of(BF16, 4, 5)), (F32, I64)),
    ("_softmax_backward_data", softmax, (of(F64, 7, 5), of(F32, 7, 5)), (F64,)),
]


def in_types(given: tuple[Any, ...], kinds: tuple[torch.dtype, ...]) -> Any:
    """All floats in the first one, integers in the last one."""
    return pytree.tree_map_only(
        torch.Tensor, lambda one: one.to(kinds[0] if one.dtype.is_floating_point else kinds[-1]), given
    )


@pytest.mark.parametrize(
    ("name", "call", "given", "kinds"), MIXES + ON_PROCESSORS, ids=[case[0] for case in MIXES + ON_PROCESSORS]
)
def test_a_mix_that_its_kernel_refuses_is_found(
    name: str, call: Callable[..., Any], given: tuple[Any, ...], kinds: tuple[torch.dtype, ...]
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as real:
        call(*pytree.tree_map_only(torch.Tensor, torch.clone, given))
    taken = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
    with pytest.raises(RuntimeError, match=rf"^{name} refuses .* and .*: .*; it takes {taken}$") as found:
        ask(call, *given)
    assert str(real.value).splitlines()[0].rstrip(".")[:20] in str(found.value)
    sound = in_types(given, kinds)
    call(*pytree.tree_map_only(torch.Tensor, torch.clone, sound))
    ask(call, *sound)


@pytest.mark.parametrize(("name", "call", "given"), [case[:3] for case in MIXES], ids=[case[0] for case in MIXES])
def test_so_is_it_for_gpus(name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """Where no autocast was there before."""
    with pytest.raises(RuntimeError, match=rf"^{name} refuses"):
        ask(call, *given, on_cuda=True)


@pytest.mark.parametrize(("call", "given"), [case[1:3] for case in ON_PROCESSORS], ids=[c[0] for c in ON_PROCESSORS])
def test_what_a_gpu_may_take_is_none_there(call: Callable[..., Any], given: tuple[Any, ...]) -> None:
    ask(call, *given, on_cuda=True)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda x, w: functional.layer_norm(x, (5,), w), (of(BF16, 7, 5), of(F32, 5))),
        (lambda x, i: x.index_add_(0, i, of(F32, 4, 5)), (of(F32, 7, 5), of(I32, 4))),
        (lambda x, m: x.index_put_((m,), of(F32)), (of(F32, 7, 5), of(torch.bool, 7, 5))),
        (lambda x, i: x.index_put_((i,), of(F32, 1, 5)), (of(F32, 7, 5), of(torch.uint8, 7))),
        (lambda x, y: x.where(x > 0, y), (of(F32, 7), of(F64, 7))),
    ],
)
def test_a_mix_that_its_kernel_takes_is_none(call: Callable[..., Any], given: tuple[Any, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # masks of eight bits are deprecated
        ask(call, *given)  # first, because torch warns once
        call(*pytree.tree_map_only(torch.Tensor, torch.clone, given))


def test_what_is_wrong_with_few_zeros_alone_is_no_finding() -> None:
    sizes = torch.ops.aten.native_layer_norm.default
    fake = FakeTensorMode()
    x, weight = fake.from_tensor(of(F64, 7, 5)), fake.from_tensor(of(F32, 4))
    Kernels(on_cuda=False).check("aten::native_layer_norm", sizes, (x, [5, 5], weight, None, 1e-5), {})


def test_a_kernel_is_asked_once_for_a_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = module.find_refusal

    def note(*given: Any) -> str | None:
        asked.append(given)
        return real(*given)

    monkeypatch.setattr(module, "find_refusal", note)
    kernels = Kernels(on_cuda=False)
    for rows in (7, 9):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^mv refuses"):
                ask(torch.mv, of(F32, rows, 5), of(F64, 5), kernels=kernels)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: functional.softmax(x, 0), I64),
        (torch.relu, torch.bool),
        (torch.linalg.cholesky, BF16),
        (torch.linalg.qr, BF16),
    ],
)
def test_a_type_without_a_kernel_is_found_for_processors(call: Callable[..., Any], kind: torch.dtype) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        call(of(kind, 4, 4))
    with pytest.raises(RuntimeError, match=rf"refuses {str(kind).removeprefix('torch.')}: .*; it takes float32$"):
        ask(call, of(kind, 4, 4))
    ask(call, of(F32, 4, 4))
    if kind is I64:
        ask(call, of(kind, 4, 4), on_cuda=True)


def test_statistics_of_a_batch_norm_in_another_type_are_a_processors_fault_alone() -> None:
    def statistics(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        functional.batch_norm(x, mean, variance, training=True)

    given = of(F32, 7, 8), of(F64, 8), of(F64, 8)
    with pytest.raises(RuntimeError, match="native_batch_norm refuses float32 and float64"):
        ask(statistics, *given)
    ask(statistics, *given, on_cuda=True)


def test_grouped_products_are_of_one_type() -> None:
    operator = torch.ops.aten._grouped_mm.default
    ends = of(I32, 3)
    with pytest.raises(RuntimeError, match="_grouped_mm expects operands of one dtype, and gets bfloat16 and float32"):
        ask(operator, of(BF16, 24, 16), of(F32, 3, 16, 8), ends)
    ask(operator, of(BF16, 24, 16), of(BF16, 3, 16, 8), ends)


@pytest.mark.sample(2)
@pytest.mark.parametrize("on_cuda", [False, True], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("dp_replicate=2,ep=2", 2)])
def test_a_sound_mixture_of_experts_in_bfloat16_has_no_fault(layout: str, world: int, on_cuda: bool) -> None:
    assert not rehearsed(Experts(), layout, world, "train.precision=bfloat16", on_cuda=on_cuda).findings


class Crossing(Layered):
    """A cross product of two types in its forward."""

    def middle(self) -> nn.Module:
        return Calling(lambda x: x + torch.linalg.cross(x[:, :3], of(F64, 8, 3)).sum().to(x.dtype))


def test_a_rehearsal_asks_for_its_own_devices() -> None:
    with pytest.raises(
        TaskError, match=r"linalg_cross refuses float32 and float64: .*; it takes float32 \(in 1, test_k"
    ):
        rehearsed(Crossing(), "single", 1)
    rehearsed(Crossing(), "single", 1, on_cuda=True)


class Narrow(Layered):
    """A norm, and a matrix times a vector, in two types."""

    kind: str = "bfloat16"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(self.width), super().model())

    def middle(self) -> nn.Module:
        return Calling(lambda x: x + torch.mv(x.float(), x[0].to(getattr(torch, self.kind)))[:, None].to(x.dtype))


def test_what_a_gpus_autocast_brings_to_one_type_is_no_fault_there() -> None:
    """FSDP gathers the norm's weight in bfloat16 there, and its input is of float32."""
    rehearsed(Narrow(), "fsdp", 2, "train.precision=bfloat16", on_cuda=True)
    with pytest.raises(TaskError, match="mv refuses"):
        rehearsed(Narrow(kind="float64"), "single", 1, "train.precision=bfloat16", on_cuda=True)
