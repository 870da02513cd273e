"""Attention over some of the keys, and what it takes to merge it."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from allranks.parallel.attention_blocks import attend, attend_backward

ATTENTION: Any = functional.scaled_dot_product_attention
blocks: Any = importlib.import_module("allranks.parallel.attention_blocks")


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.fixture(params=["fused", "plain"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if request.param == "plain":
        monkeypatch.setattr(blocks, "_kernel", lambda query, value: "")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_block_is_torchs_attention(causal: bool, key_heads: int, scale: float | None) -> None:
    query, gradient = random(2, 6, 8, 4), random(2, 6, 8, 4)
    key, value = random(2, key_heads, 8, 4), random(2, key_heads, 8, 4)
    leaves = [part.clone().requires_grad_() for part in (query, key, value)]
    expected = ATTENTION(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    expected.backward(gradient)
    output, log_sum = attend(query, key, value, causal=causal, scale=scale)
    torch.testing.assert_close(output, expected.detach(), rtol=1e-13, atol=1e-14)
    found = attend_backward(gradient, query, key, value, output, log_sum, causal=causal, scale=scale)
    for mine, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-12, atol=1e-14)


def test_the_sum_of_exponentials_comes_with_it() -> None:
    query, key = random(1, 2, 3, 4), random(1, 2, 5, 4)
    _, log_sum = attend(query, key, random(1, 2, 5, 4), causal=False, scale=None)
    torch.testing.assert_close(log_sum, (query @ key.mT / math.sqrt(4)).logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_types_keep_their_sums_in_float32(dtype: torch.dtype) -> None:
    query, key, value = (random(1, 2, 8, 16, dtype=dtype) for _ in range(3))
    output, log_sum = attend(query, key, value, causal=True, scale=None)
    assert (output.dtype, log_sum.dtype) == (dtype, torch.float32)
    expected = functional.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    assert float((output - expected).abs().max()) < 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    found = attend_backward(output, query, key, value, output, log_sum, causal=True, scale=None)
    assert [part.dtype for part in found] == [dtype] * 3


def test_values_may_be_wider_than_keys() -> None:
    query, key, value = random(1, 2, 3, 4), random(1, 2, 5, 4), random(1, 2, 5, 6)
    output, log_sum = attend(query, key, value, causal=False, scale=None)
    torch.testing.assert_close(output, functional.scaled_dot_product_attention(query, key, value))
    shapes = [part.shape for part in attend_backward(output, query, key, value, output, log_sum, causal=False, scale=1)]
    assert shapes == [query.shape, key.shape, value.shape]


@pytest.mark.parametrize(("capability", "kernel"), [((7, 5), ""), ((8, 0), "cuda"), ((12, 0), "cuda")])
def test_a_gpu_older_than_its_kernel_multiplies_plainly(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kernel: str
) -> None:
    """Called by its name, FlashAttention refuses a T4 or a V100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    there: Any = SimpleNamespace(shape=(1, 2, 8, 64), dtype=torch.float16, device=torch.device("cuda", 0))
    assert blocks._kernel(there, there) == kernel


@pytest.mark.gpu
def test_sums_of_some_of_the_queries_are_read_as_they_are_meant() -> None:
    """A causal ring takes the second half of its queries, whose sums lie apart; the kernel wants them dense."""
    query, key, value, gradient = (random(2, 3, 64, 32, dtype=torch.bfloat16).cuda() for _ in range(4))
    output, log_sum = attend(query, key, value, causal=False, scale=None)
    half = [part[:, :, 32:] for part in (gradient, query, output, log_sum)]
    dense = [part.contiguous() for part in half]
    found, expected = (
        attend_backward(some[0], some[1], key, value, some[2], some[3], causal=False, scale=None)
        for some in (half, dense)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)
