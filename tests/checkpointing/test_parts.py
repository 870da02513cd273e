"""The digest of tensors in parts, for every dtype and device, and what a checkpoint refuses to hold."""

import dataclasses
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from allranks.checkpointing import parts as module
from allranks.checkpointing.parts import stored_parts, tensor_digest
from allranks.checkpointing.tensor_file import DTYPES
from allranks.errors import CheckpointError
from allranks.parameter_map import Box, Entry

MODULUS = 1 << 64


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits, NaNs and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def edges(extent: int) -> list[tuple[int, int]]:
    """Three uneven pieces, one of them empty."""
    return [(0, extent // 3), (extent // 3, extent // 3), (extent // 3, extent)]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(11,), (7, 5), (3, 4, 5), (1, 9, 1)])
def test_uneven_boxes_in_every_dim_add_up_in_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, getattr(torch, name))
    whole = tensor_digest(tensor, (0,) * len(shape))
    for dims in (range(len(shape)), [0], [len(shape) - 1]):
        cuts = [edges(extent) if dim in dims else [(0, extent)] for dim, extent in enumerate(shape)]
        total = sum(
            tensor_digest(tensor[tuple(slice(a, b) for a, b in box)], [a for a, _ in box]) for box in product(*cuts)
        )
        assert total % MODULUS == whole


def test_scalars_and_empty_tensors() -> None:
    assert tensor_digest(torch.tensor(2.5), ()) == tensor_digest(torch.tensor([2.5]), (0,)) != 0
    assert tensor_digest(torch.tensor(2.5, dtype=torch.float64), ()) != tensor_digest(torch.tensor(2.5), ())
    assert tensor_digest(torch.empty(0, 5), (3, 0)) == 0
    assert tensor_digest(torch.empty(4, 0, dtype=torch.float64), (0, 0)) == 0


@pytest.mark.parametrize("name", DTYPES)
def test_every_flipped_bit_of_every_dtype_is_seen(name: str) -> None:
    dtype = getattr(torch, name)
    data = random_bits((5,), dtype)
    good = tensor_digest(data, (0,))
    for byte, bit in product(range(5 * dtype.itemsize), [0] if name == "bool" else range(8)):
        changed = data.clone()
        changed.view(torch.uint8)[byte] ^= 1 << bit
        assert tensor_digest(changed, (0,)) != good


def test_values_that_compare_equal_and_differ_in_bits_are_told_apart() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        zero = torch.zeros(4, dtype=dtype)
        negative = zero.clone()
        negative[1] = -0.0
        assert torch.equal(zero, negative) and tensor_digest(zero, (0,)) != tensor_digest(negative, (0,))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_digest(nans[:1], (0,)) != tensor_digest(nans[1:], (0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_layout_in_memory_does_not_matter(dtype: torch.dtype) -> None:
    tensor = random_bits((6, 9), dtype)
    good = tensor_digest(tensor, (0, 0))
    assert tensor_digest(tensor.t().contiguous().t(), (0, 0)) == good
    spread = torch.zeros(12, 18, dtype=dtype)[::2, ::2]
    spread.copy_(tensor)
    assert (
        torch.equal(spread.contiguous().view(torch.uint8), tensor.view(torch.uint8))
        and tensor_digest(spread, (0, 0)) == good
    )
    assert tensor_digest(torch.nn.Parameter(tensor), (0, 0)) == good
    image = random_bits((2, 3, 4, 5), dtype)
    assert tensor_digest(image.contiguous(memory_format=torch.channels_last), (0,) * 4) == tensor_digest(
        image, (0,) * 4
    )


def test_a_lazy_conjugate_or_negative_counts_as_its_value() -> None:
    value = torch.randn(5, dtype=torch.complex64)
    assert tensor_digest(value.conj(), (0,)) == tensor_digest(value.conj().resolve_conj().clone(), (0,))
    assert tensor_digest(value.conj().imag, (0,)) == tensor_digest(value.conj().imag.resolve_neg().clone(), (0,))


def test_large_tensors_are_cut_into_blocks_without_a_seam() -> None:
    long = torch.arange(3_000_000, dtype=torch.int32)
    halves = tensor_digest(long[:1_234_567], (0,)) + tensor_digest(long[1_234_567:], (1_234_567,))
    assert halves % MODULUS == tensor_digest(long, (0,))
    wide = torch.arange(3_000_000, dtype=torch.int32).reshape(3, 1_000_000)
    columns = tensor_digest(wide[:, :333_333], (0, 0)) + tensor_digest(wide[:, 333_333:], (0, 333_333))
    assert columns % MODULUS == tensor_digest(wide, (0, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "int8", "bool"])
def test_a_gpu_computes_the_same_digest(name: str) -> None:
    tensor = random_bits((333, 1111), getattr(torch, name))
    assert tensor_digest(tensor.cuda(), (5, 7)) == tensor_digest(tensor, (5, 7))


def test_tensors_that_are_not_what_their_entry_says_are_refused() -> None:
    entry = Entry("w", (4, 3), "float32", Box((0, 0), (2, 3)), (0, 1))
    good = torch.zeros(2, 3)
    other = dataclasses.replace(entry, alias_of="v"), dataclasses.replace(entry, persistent=False)
    assert stored_parts([(entry, good), *((e, good) for e in other)]) == [(entry, good)]
    with pytest.raises(
        CheckpointError, match=r"'w': the local tensor is float32\[4, 3\], its entry says float32\[2, 3\]"
    ):
        stored_parts([(entry, torch.zeros(4, 3))])
    with pytest.raises(CheckpointError, match=r"is float64\[2, 3\], its entry says float32"):
        stored_parts([(entry, good.double())])
    with pytest.raises(CheckpointError, match=r"'w': a torch\.sparse_coo tensor"):
        stored_parts([(entry, good.to_sparse())])


def test_a_machine_of_another_byte_order_is_refused_before_it_reads_or_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_parts([]) == []
    monkeypatch.setattr(module, "sys", SimpleNamespace(byteorder="big"))
    with pytest.raises(CheckpointError, match="little-endian, this machine is not: read and write them on one"):
        stored_parts([])
