"""The ranks of an own loop: what they save and load, in float64 and in the precision that is the program's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

import allranks
from allranks.verifying.own_loop import Setting
from allranks.verifying.own_ranks import run_in_own_precision
from allranks.verifying.own_verify import CAST
from allranks.verifying.program import Program

pytestmark = pytest.mark.distributed

DATA = [(torch.arange(12.0).reshape(4, 3) / 7 + step, torch.tensor([0, 1, 0, 1])) for step in range(4)]


def built(dtype: torch.dtype | None = None) -> Callable[[bool], Any]:
    def build(distributed: bool) -> Any:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype=dtype)
        if distributed:
            model = nn.parallel.DistributedDataParallel(model)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    return build


def step(model: Any, optimizer: Any, batches: Any) -> None:
    optimizer.zero_grad()
    ((x, y),) = batches
    nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
    optimizer.step()


def saving(dtype: torch.dtype) -> Callable[[Any, Any, Path], None]:
    """A save of everything in `dtype`."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def save(model: Any, optimizer: Any, folder: Path) -> None:
        if dist.get_rank() == 0:
            state = [model.module.state_dict(), optimizer.state_dict()]
            torch.save(pytree.tree_map(cast, state), folder / "state.pt")
        dist.barrier()

    return save


def load(model: Any, optimizer: Any, folder: Path) -> None:
    load_parameters(model, optimizer, folder)
    optimizer.load_state_dict(torch.load(folder / "state.pt")[1])


def load_parameters(model: Any, optimizer: Any, folder: Path) -> None:
    model.module.load_state_dict(torch.load(folder / "state.pt")[0])


@pytest.mark.parametrize(
    ("own", "saved", "loading", "kinds"),
    [
        (None, torch.float32, load, []),  # of float32, of which verify makes float64
        (None, torch.bfloat16, load, ["S40"]),
        pytest.param(torch.float64, torch.float32, load, ["S40"], marks=pytest.mark.full),
        pytest.param(None, torch.float32, load_parameters, ["S17"], marks=pytest.mark.full),
    ],
)
def test_a_save_is_a_loss_where_it_has_less_than_the_programs_own_precision(
    own: torch.dtype | None, saved: torch.dtype, loading: Any, kinds: list[str]
) -> None:
    answer = allranks.verify(built(own), step, DATA, save=saving(saved), load=loading)
    assert [finding.verdict.kind for finding in answer.findings] == kinds, str(answer)
    assert (CAST in answer.notes) == (not kinds)


def failing(model: Any, optimizer: Any, batches: Any) -> None:
    raise ValueError("no")


def test_ranks_that_have_it_or_fail_in_it_are_not_run_in_it(tmp_path: Path) -> None:
    exact = Setting(2, folder=str(tmp_path / "x"))
    assert run_in_own_precision(Program(built(), step, DATA), Setting(2, None), 2) == ()
    first, _ = run_in_own_precision(Program(built(), step, DATA), exact, 2)
    assert first.start.parameters["0.weight"].value.dtype == torch.float32
    assert run_in_own_precision(Program(built(), failing, DATA), exact, 2) == ()


def rows(held: dict[str, torch.Tensor], *, back: bool) -> dict[str, torch.Tensor]:
    """Tensors whose rows are put in the order of the ranks that would have them, of as many as there are; or back."""
    size = dist.get_world_size()
    if back:
        return {name: value.unflatten(0, (size, -1)).transpose(0, 1).flatten(0, 1) for name, value in held.items()}
    return {name: torch.cat([value[rank::size] for rank in range(size)]) for name, value in held.items()}


def save_interleaved(model: Any, optimizer: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        held = {name: value.float() for name, value in rows(model.module.state_dict(), back=False).items()}
        torch.save([held, optimizer.state_dict()], folder / "state.pt")
    dist.barrier()


def load_interleaved(model: Any, optimizer: Any, folder: Path) -> None:
    held, state = torch.load(folder / "state.pt")
    model.module.load_state_dict(rows(held, back=True))
    optimizer.load_state_dict(state)


def test_a_save_that_casts_is_read_on_one_process_in_the_programs_own_precision() -> None:
    answer = allranks.verify(built(), step, DATA, save=save_interleaved, load=load_interleaved)
    assert [finding.verdict.kind for finding in answer.findings] == ["S18"], str(answer)
    assert "on one process" in answer.findings[0].verdict.what and CAST in answer.notes


def in_groups(distributed: bool) -> Any:
    """Two groups on one device, a group for each tensor on the ranks."""
    model, _ = built()(distributed)
    first, second = (list(getattr(model, "module", model)[place].parameters()) for place in (0, 2))
    groups = [([*first], 0.01), ([*second], 0.02)]
    if distributed:
        groups = [([tensor], rate) for tensors, rate in groups for tensor in tensors]
    return model, torch.optim.Adam([{"params": tensors, "lr": rate} for tensors, rate in groups])


def load_in_less_groups(model: Any, optimizer: Any, folder: Path) -> None:
    """And go on in as many groups as one device has, which changes nothing."""
    load(model, optimizer, folder)
    one, other, three, four = optimizer.param_groups
    optimizer.param_groups[:] = [one | {"params": one["params"] + other["params"]}]
    optimizer.param_groups.append(three | {"params": three["params"] + four["params"]})


def test_settings_in_the_programs_own_precision_stand_where_one_device_has_them() -> None:
    few_steps = DATA[:2]  # one save: a second would be of other groups
    answer = allranks.verify(
        in_groups, step, few_steps, num_steps=2, save=saving(torch.float32), load=load_in_less_groups
    )
    assert answer.equal and CAST in answer.notes, str(answer)
