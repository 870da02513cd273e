"""What one device is asked to do: every shape and precision once, and the work that its key says."""

from pathlib import Path

import pytest
import torch

from allranks.profiling.compute_rates import CPU_QUICK_SHAPES, CPU_SHAPES, PRECISIONS, QUICK_PRECISIONS, compute_cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torch_compiler_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets it at the first optimizer."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def keys(*, quick: bool) -> list[object]:
    return [case.key for case in compute_cases(CPU, quick=quick)]


def test_every_shape_in_every_precision_once() -> None:
    products = [key for key in keys(quick=False) if isinstance(key, tuple) and key[0] == "matmul"]
    assert products == [("matmul", precision, *shape) for precision in PRECISIONS for shape in CPU_SHAPES]
    quick = [key for key in keys(quick=True) if isinstance(key, tuple) and key[0] == "matmul"]
    assert quick == [("matmul", precision, *shape) for precision in QUICK_PRECISIONS for shape in CPU_QUICK_SHAPES]


def test_what_a_plan_cannot_do_without_comes_first() -> None:
    first = [(case.key[0], case.needed) for case in compute_cases(CPU, quick=True) if isinstance(case.key, tuple)][:4]
    assert first == [("kernel", True), ("copy", True), ("update", True), ("pass", False)]


def test_a_product_is_the_one_of_its_key() -> None:
    for case in compute_cases(CPU, quick=True):
        match case.key:
            case ("matmul", str(precision), int(rows), int(inner), int(columns)):
                product = case.call()
                assert isinstance(product, torch.Tensor)
                assert (product.shape, product.dtype) == ((rows, columns), PRECISIONS[precision])
                assert inner > 0 and torch.isfinite(product).all()


def test_a_copy_and_an_update_have_the_size_of_their_keys() -> None:
    cases = {case.key[0]: case for case in compute_cases(CPU, quick=True) if isinstance(case.key, tuple)}
    target = cases["copy"].call()
    assert isinstance(target, torch.Tensor) and cases["copy"].key == ("copy", target.nbytes)
    result = cases["pass"].call()
    assert isinstance(result, torch.Tensor) and cases["pass"].key == ("pass", result.nbytes)
    cases["update"].call()
    optimizer = getattr(cases["update"].call, "__self__")  # noqa: B009
    (parameter,) = optimizer.param_groups[0]["params"]
    assert cases["update"].key == ("update", parameter.numel())
    assert optimizer.defaults["fused"] and optimizer.state[parameter]["step"] == 1
