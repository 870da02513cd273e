"""Looking from outside: logical names, digests of samples, dropouts, noise by sample, clipping."""

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from allranks.verifying import observation as look


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_wrappers_leave_the_names() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(look.logical_parameters(Wrapped())) == names
    assert list(look.logical_parameters({"net": Wrapped()})) == [f"net.{name}" for name in names]
    wrapped = Wrapped()
    wrapped.module[0] = checkpoint_wrapper(wrapped.module[0])
    assert list(look.logical_parameters(nn.ModuleDict({"_orig_mod": wrapped}))) == names
    assert look.logical_name(wrapped, "module.0._checkpoint_wrapped_module") == "0"
    assert "1.running_mean" in look.logical_buffers(Wrapped())


class Nested(nn.Module):
    """Its children are called as what wrappers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.module = nn.Linear(2, 2)
        self.inner = nn.ModuleDict({"module": nn.Linear(2, 2), "bias": nn.Linear(2, 2)})


def test_a_child_that_is_called_module_keeps_its_name() -> None:
    """Its weight and the model's own were one name, of which the second was never looked at."""
    model, names = Nested(), [name for name, _ in Nested().named_parameters()]
    assert "module.weight" in names and list(look.logical_parameters(model)) == names
    assert list(look.logical_parameters(nn.DataParallel(model))) == names
    wrapped = Wrapped()
    wrapped.module.append(model)
    assert list(look.logical_parameters(wrapped))[4:] == [f"2.{name}" for name in names]


class Averaged(nn.Module):
    """A wrapper by hand that counts what it does, and holds more than what it wraps."""

    def __init__(self, module: nn.Module, counter: str = "syncs") -> None:
        super().__init__()
        self.module, self.criterion = module, nn.PReLU()
        self.register_buffer(counter, torch.zeros(()))


def test_a_wrapper_by_hand_may_hold_more_than_what_it_wraps() -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(look.logical_parameters(Averaged(Wrapped()))) == [*names, "criterion.weight"]
    assert list(look.logical_buffers(Averaged(nn.Linear(2, 2)))) == ["syncs"]
    inner = Averaged(nn.Linear(2, 2), "0")
    inner.module = nn.ModuleDict({"_orig_mod": Wrapped()})
    assert list(look.logical_parameters(inner))[:2] == ["module.0.weight", "module.0.bias"], "two would be one"


def test_tied_parameters_are_there_under_both_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    found = look.logical_parameters(model)
    assert found["a.weight"] is found["b.weight"]


def test_samples_are_known_by_their_values() -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    whole = look.rows_of((x, y))
    assert look.rows_of((x[2:], y[2:])) == whole[2:] and len(set(whole)) == 4
    assert look.rows_of((x, y.flip(0))) != whole
    padded = torch.cat([y[:, None], torch.full((4, 1), -100)], 1)
    longer = torch.cat([y[:, None], torch.full((4, 5), -100)], 1)
    assert look.rows_of(padded) == look.rows_of(longer)
    assert len(look.rows_of((x, y[:2]))) == 1 and len(look.rows_of("text")) == 1


def test_shaking_moves_by_ulps() -> None:
    parameter = nn.Parameter(torch.ones(50, dtype=torch.float64))
    look.shake({"a": parameter, "b": parameter}, 1)
    moved = (parameter.detach() - 1).abs().max()
    assert 0 < float(moved) <= 2.3e-16


def test_values_of_samples_and_their_shapes() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
    whole, part = look.values_of({"x": x, "y": y}), look.values_of({"x": x[1:], "y": y[1:]})
    assert len(whole) == 3 and part == whole[1:] and len(set(whole)) == 3
    longer = look.values_of({"x": nn.functional.pad(x, (0, 1)), "y": y})
    assert longer[0][0] != whole[0][0] and len({shapes for shapes, _ in longer}) == 1
    assert look.values_of((x, torch.ones(2))) == look.values_of(3) == look.values_of(torch.ones(())) == []


def test_a_packed_batch_has_no_rows() -> None:
    """Atoms of several molecules one behind the other, and an energy for each molecule."""
    packed = {"places": torch.zeros(5, 3), "energies": torch.zeros(2)}
    assert not look.has_rows(packed) and len(look.rows_of(packed)) == 1
    assert look.has_rows({"x": torch.zeros(5, 3), "y": np.zeros(5)})
    assert not look.has_rows([1, 2]) and not look.has_rows(torch.ones(()))


def test_what_has_no_difference_is_brought_to_what_has_one() -> None:
    """torch has no bool minus bool, 0 - 1 of a byte is 255, and of sparse tensors there is no largest value."""
    for tensor in (torch.tensor([True, False]), torch.tensor([1, 0], dtype=torch.uint8), torch.tensor([1.0, 0.0])):
        found = look.comparable(tensor)
        assert (found - torch.tensor([0, 1])).tolist() == [1, -1] and found.abs().max() == 1
        assert found.data_ptr() != tensor.data_ptr()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert look.part_of(table.weight.grad).value.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
