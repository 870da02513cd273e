"""What is made of modules' outputs is followed between modules, and its use behind them is noted."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.parallel.dependence import Dependence


def test_what_is_made_of_a_modules_output_depends_on_it() -> None:
    plain, output = torch.ones(2, 3), torch.rand(2, 3)
    written, viewed = torch.zeros(2, 3), torch.zeros(6)
    with Dependence() as followed:
        followed.mark({"output": [output]})
        largest = output.max(dim=1)
        view = viewed[2:]
        view[0] = output.sum()
        written.add_(output)
        made = [output, output > 0, largest.values, largest.indices, output[:1].T, written, viewed]
        made.append(torch.cat([plain, output]))
        made.extend(output)  # its rows
        beside = [plain, plain + 1, torch.zeros_like(output), output.new_ones(2), plain.type_as(output)]
        beside.append(plain.expand_as(output))
        assert all(map(followed.holds, made))
        assert not any(map(followed.holds, beside)) and not followed.holds(output.shape)
    assert not followed.wrong


def test_what_a_module_does_inside_is_its_own() -> None:
    output = torch.ones(3)
    with Dependence() as followed:
        followed.mark(output)
        with followed.paused():
            inner = output + 1
        with torch.device("cpu"), followed.paused():  # another mode on top of it
            seen = output + 1
        assert not followed.holds(inner) and followed.holds(seen)


@pytest.mark.parametrize("read", [bool, float, int, torch.Tensor.item, torch.Tensor.tolist, lambda t: 1.0 in t])
def test_a_value_read_before_the_stage_begins_is_noted(read: Any) -> None:
    output = torch.ones(1)
    with Dependence() as followed:
        read(torch.ones(1))
        followed.mark(output)
        assert output.shape and output.dim() and not followed.wrong
        read(output)
    assert (
        "test_dependence.py:" in followed.wrong and "reads the value of a tensor that another stage" in followed.wrong
    )


@pytest.mark.parametrize("use", [functional.linear, torch.add])  # torch takes the one, and not the other
def test_a_parameter_without_memory_is_refused_once_the_stage_has_begun(use: Any) -> None:
    module = nn.Linear(3, 1, bias=False, device="meta")
    with Dependence(module) as followed:
        assert (module.weight + 1).is_meta  # for the stage before: what it makes is replaced
        followed.begin(())
        assert module.weight.shape == (1, 3) and torch.ones(1).to(module.weight.dtype) == 1
        where = rf"test_dependence.py:\d+ uses weight outside of its module \({use.__name__}\), and only another stage"
        with pytest.raises(LayoutError, match=where):
            use(torch.ones(1, 3), module.weight)


def test_a_stage_that_runs_may_read_what_it_has() -> None:
    output = torch.ones(1)
    with Dependence() as followed:
        followed.begin([output])
        assert output.item() == 1 and followed.holds(output)
    assert not followed.wrong


def test_what_has_not_come_along_is_noted_where_it_is_used() -> None:
    zeros, received = torch.zeros(3), torch.ones(3)
    with Dependence() as followed:
        followed.mark(zeros)
        followed.begin([received])
        assert zeros.shape == (3,) and torch.zeros_like(zeros).sum() == 0
        followed.check_call("blocks.1", [received, 3])
        assert not followed.wrong
        followed.check_call("blocks.2", [received, zeros])
        assert followed.wrong.startswith("blocks.2 is called with a tensor of an earlier stage")
    with Dependence() as followed:
        followed.mark(zeros)
        followed.begin([received])
        torch.add(received, zeros)
    assert followed.wrong.endswith("uses a tensor of an earlier stage beside the blocks (add)")


def test_objects_that_modules_make_are_not_sent() -> None:
    class Cache:
        pass

    given, made = Cache(), Cache()
    with Dependence() as followed:
        followed.mark((torch.ones(2), given, 3, "word", None), given=(torch.ones(2), given))
        followed.check_sent("blocks.2", [given, 3, "word", None])
        assert not followed.wrong
        followed.mark((torch.ones(2), made), given=(torch.ones(2),))
        followed.check_sent("blocks.2", [made])
    assert followed.wrong.startswith("blocks.2 is called with a Cache that a module before it has made")


def test_a_tensor_without_storage_is_followed() -> None:
    sparse, other = torch.eye(2).to_sparse(), torch.eye(2).to_sparse()
    with Dependence() as followed:
        followed.mark(sparse)
    assert followed.holds(sparse) and not followed.holds(other)
