"""Kernels by name, and their operations by hand."""

from typing import Any

import pytest
import torch

from allranks.profiling.kernels import count_flops, is_causal, kind_of, name_of, shape_of

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("addmm", "matmul"),
        ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "elementwise"),
        ("convolution", "conv"),
        ("embedding", "embedding"),
        ("native_layer_norm", "norm"),
        ("nll_loss_forward", "loss"),
        ("topk", "route"),
        ("cumsum", "scan"),
        ("gelu", "elementwise"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def run(func: Any, *args: Any, **kwargs: Any) -> tuple[float, tuple[int, ...]]:
    found = func(*args, **kwargs)
    return count_flops(func, args, kwargs, found), shape_of(name_of(func), args, found)


def test_products() -> None:
    left, right = torch.zeros(6, 5), torch.zeros(5, 7)
    assert run(ATEN.mm.default, left, right) == (2 * 6 * 5 * 7, (6, 7, 5))
    assert run(ATEN.addmm.default, torch.zeros(7), left, right) == (2 * 6 * 5 * 7, (6, 7, 5))
    assert run(ATEN.bmm.default, torch.zeros(3, 6, 5), torch.zeros(3, 5, 7)) == (3 * 2 * 6 * 5 * 7, (18, 7, 5))
    assert run(ATEN.mv.default, left, torch.zeros(5)) == (2 * 6 * 5, (6, 1, 5))
    assert run(ATEN.addmv.default, torch.zeros(6), left, torch.zeros(5)) == (2 * 6 * 5, (6, 1, 5))
    assert run(ATEN.relu.default, left) == (0.0, ())


def test_products_of_groups() -> None:
    rows, experts, ends = torch.zeros(8, 16), torch.zeros(2, 16, 32), torch.tensor([3, 8], dtype=torch.int32)
    assert run(ATEN._grouped_mm.default, rows, experts, ends) == (2 * 8 * 16 * 32, (8, 32, 16))
    gradient = torch.zeros(8, 32)
    # The gradient of the experts: each row in one of them.
    assert run(ATEN._grouped_mm.default, rows.t(), gradient, ends)[0] == 2 * 16 * 8 * 32


def test_a_convolution() -> None:
    images, weight = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    given = (images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    rows = 2 * 8 * 8
    assert run(ATEN.convolution.default, *given) == (2 * rows * 4 * 27, (rows, 4, 27))


def test_attention() -> None:
    query, key = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 6, 8)
    func = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    assert run(func, query, key, key) == (2 * 2 * 2 * 4 * 6 * 6 * 8, (6, 6, 4, 4, 8))
    # Queries that share heads of keys and values compute as much, and remember fewer of them.
    shared = torch.zeros(2, 2, 6, 8)
    assert run(func, query, shared, shared) == (2 * 2 * 2 * 4 * 6 * 6 * 8, (6, 6, 4, 2, 8))
    back = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    for keys in (key, shared):
        assert count_flops(back, (query, query, keys, keys), {}, ()) == 5 * 2 * 2 * 4 * 6 * 6 * 8
        assert count_flops(ATEN._scaled_dot_product_flash_attention.default, (query, keys, keys), {}, ()) == (
            2 * 2 * 2 * 4 * 6 * 6 * 8
        )
    assert is_causal(func, (query, key, key, 0.0, True), {})
    assert is_causal(func, (query, key, key), {"is_causal": True})
    assert not is_causal(func, (query, key, key), {})
    assert not is_causal(ATEN.mm.default, (), {})


def test_an_operator_over_functions_has_its_own_name() -> None:
    assert name_of(torch.ops.higher_order.cond) == "cond"
    assert not is_causal(torch.ops.higher_order.cond, (), {})
