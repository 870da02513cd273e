"""Modes that change how blocks run compute what the layout computes without them, and say what they do."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel import block_modes, host_parameters, offload
from allranks.parallel.block_modes import change_blocks, changes_blocks
from allranks.parallel.blocks import find_blocks
from allranks.verifying.parity import RecordedStep, record_run
from tests.distributed.matrix_models import Sentence
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, parts_of, processes_of, session_of, step_through
from tests.distributed.tasks import MODELS, WIDTH, CountingTask, Tiny

CPU = torch.device("cpu")


def change(module: nn.Module, **modes: Any) -> list[str]:
    modules = {"": module}
    decisions = change_blocks(modules, find_blocks(modules), Layout(**modes), CPU)
    return [str(decision) for decision in decisions]


def test_nothing_is_changed_where_no_mode_is_asked_for() -> None:
    module = MODELS["tied"]()
    assert not changes_blocks(Layout(dp_shard=2))
    assert change(module) == []
    assert not any("forward" in vars(member) for member in module.modules())


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        (
            {"recompute": "full"},
            [
                "the activations of 2 blocks are computed again in the backward, because recompute=full: between the "
                "two only their inputs and outputs are kept (blocks.0, blocks.1)"
            ],
        ),
        (
            {"recompute": "selective"},
            [
                "the activations of 2 blocks are computed again in the backward, but for what is expensive, because "
                "recompute=selective: attention, convolutions and every second matrix product are kept "
                "(blocks.0, blocks.1)"
            ],
        ),
        (
            {"compile": "block", "recompute": "budget"},
            [
                "the activations of 2 blocks are computed again in the backward where that is cheap, because "
                "recompute=budget: torch.compile keeps 50% of the activations that it would keep (blocks.0, blocks.1)",
                "2 blocks run compiled, from their first call on, because compile=block: equal blocks share one graph; "
                "dropout draws other masks than uncompiled (blocks.0, blocks.1)",
            ],
        ),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_what_is_done_is_said_and_nothing_is_renamed(modes: dict[str, str], said: list[str]) -> None:
    module = MODELS["tied"]()
    names = [name for name, _ in module.named_parameters()], [name for name, _ in module.named_modules()]
    assert change(module, **modes) == said
    changed = [name for name, member in module.named_modules() if "forward" in vars(member)]
    assert changed == ["blocks.0", "blocks.1"]
    assert names == ([name for name, _ in module.named_parameters()], [name for name, _ in module.named_modules()])


def refusal(module: nn.Module, **modes: str) -> str:
    with pytest.raises(LayoutError) as raised:
        change(module, **modes)
    return str(raised.value)


def test_a_model_without_repeated_blocks_is_refused() -> None:
    assert refusal(nn.Linear(2, 2), recompute="full", compile="block") == (
        "recompute=full and compile=block changes the model block by block, and no part of it repeats: name its parts "
        "in hints().blocks"
    )


def test_offload_without_an_accelerator_is_refused() -> None:
    assert refusal(MODELS["tied"](), offload="activations") == (
        "offload=activations moves what waits for the backward from an accelerator to the host's memory, and this "
        "device is the CPU: leave it out, or use recompute=full"
    )


CUT = ("train.global_batch=5", "train.micro_steps=3", *SGD)  # of 5 samples in 3 micro-steps some rank has none


def record(kinds: Sequence[str], layout: str) -> list[list[RecordedStep]]:
    config = config_of(layout, *CUT, steps=2)
    processes = processes_of(config)
    tasks = [CountingTask(drop=0.3) if kind == "counting" else Tiny(kind=kind) for kind in kinds]
    return [record_run(task, config, processes, 2) for task in tasks]


def alike(some: Sequence[RecordedStep], others: Sequence[RecordedStep]) -> bool:
    """Whether two runs have the same gradients, losses and norms to the bit."""
    pairs = list(zip(some, others, strict=True))
    return all((one.loss, one.norm) == (other.loss, other.norm) for one, other in pairs) and all(
        one.gradients.keys() == other.gradients.keys()
        and all(torch.equal(part, other.gradients[name][-1]) for name, (*_, part) in one.gradients.items())
        for one, other in pairs
    )


ALL = (*MODELS, "counting")
LAYOUTS = [
    ("single", 1, ("counting",)),
    ("ddp", 2, ALL),
    ("fsdp", 2, ALL),
    ("fsdp,sharding=grad_op", 2, ("sharing", "counting")),
    ("fsdp,sharding=none", 2, ("sharing", "counting")),
    ("dp_replicate=2,dp_shard=2", 4, ("sharing", "counting")),
]


@pytest.mark.distributed
@pytest.mark.sample(4)
@pytest.mark.parametrize(("layout", "world_size", "kinds"), LAYOUTS, ids=[layout for layout, *_ in LAYOUTS])
def test_recomputing_changes_no_bit(pool: Pools, layout: str, world_size: int, kinds: Sequence[str]) -> None:
    """Gradients, loss and norm of models of the laws, and of one that drops and counts in its blocks."""
    modes = ("none", "full", "selective")
    runs = [pool(world_size).run(record, kinds, f"{layout},recompute={mode}", timeout=120) for mode in modes]
    for rank in range(world_size):
        for index, kind in enumerate(kinds):
            plain, *others = (run[rank][index] for run in runs)
            assert all(alike(plain, other) for other in others), kind


def record_offloaded(kind: str, layout: str, overrides: Sequence[str]) -> tuple[list[RecordedStep], int]:
    """In a worker, with the CPU in the accelerator's place: the steps, and how many tensors waited elsewhere."""
    # A pipeline's micro-steps are of one shape, and as many as its stages at least.
    cut = ("train.global_batch=8", "train.micro_steps=4", *SGD) if "pp" in layout else CUT
    config = config_of(layout, *cut, *overrides, steps=2)
    task = {"counting": CountingTask(drop=0.3), "sentence": Sentence(kind="transformer")}.get(kind) or Tiny(kind=kind)
    moved, waiting = list[int](), offload._Waiting

    def wait(*args: Any) -> Any:
        moved.append(1)
        return waiting(*args)

    with (
        patch.object(host_parameters, "has_own_memory", lambda device: True),
        patch.object(block_modes, "Offloader", partial(offload.Offloader, smallest_bytes=0)),
        patch.object(offload, "_Waiting", wait),
    ):
        return record_run(task, config, processes_of(config), 2), len(moved)


OFFLOADED = [
    ("counting", "fsdp", 2),
    ("sharing", "fsdp,sharding=grad_op", 2),
    ("transformer", "tp=2", 2),
    ("encoder", "tp=2,dp_shard=2", 4),
    ("transformer", "cp=2", 2),
    ("sentence", "cp=2 layout.context=ring", 2),
    ("transformer", "pp=2", 2),
    ("transformer", "pp=2,dp_shard=2", 4),
    ("sentence", "pp=2,schedule=interleaved", 2),
    ("sentence", "pp=2,schedule=zbv", 2),
    ("moe", "dp_replicate=2,ep=2", 2),
    ("moe", "dp_shard=2,ep=2", 2),
]


@pytest.mark.distributed
@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "layout", "size"), OFFLOADED, ids=str)
def test_offloaded_activations_change_no_bit(pool: Pools, kind: str, layout: str, size: int) -> None:
    """Both memories are one here; that values cross between two is tested where there is a GPU (bench/gpu)."""
    name, *context = layout.split()
    plain, offloaded = (
        pool(size).run(record_offloaded, kind, f"{name}{mode}", context, timeout=120)
        for mode in ("", ",offload=activations")
    )
    for (steps, none), (others, some) in zip(plain, offloaded, strict=True):
        assert alike(steps, others)
        assert none == 0 < some


def static_graph(recompute: str) -> Any:
    config = config_of("ddp", "layout.static_graph=true", f"layout.recompute={recompute}", *CUT)
    session = session_of(CountingTask(drop=0.3), config)
    list(step_through(session, 3))
    said = [d.what for d in session.decisions if "activations" in d.what]
    return parts_of(session), session.spread.path.take(), said


@pytest.mark.distributed
def test_a_static_graph_and_counters(pool: Pools) -> None:
    plain, found = (pool(2).run(static_graph, mode) for mode in ("none", "full"))
    assert [said for *_, said in plain] == [[], []]
    assert [said for *_, said in found] == [["the activations of 3 blocks are computed again in the backward"]] * 2
    for (one, *_), (other, *_) in zip(plain, found, strict=True):
        # A rank that had a filler has counted less: buffers are each rank's own here.
        assert all(torch.equal(one[name][2], other[name][2]) for name in one)
        assert one["blocks.0.calls"][2] > 3


def evaluate_here(layout: str) -> Any:
    from allranks.stepping.evaluate import evaluate

    config = config_of(layout, *CUT)
    session = session_of(CountingTask(drop=0.3), config)
    with session.loader() as loader:
        batch = next(loader)
    assert batch is not None
    found = evaluate(session.forward, batch.micro_steps, session.processes.data_group)
    list(step_through(session, 1))
    return found, parts_of(session)


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_evaluation_between_steps(pool: Pools, layout: str) -> None:
    plain, found = (pool(2).run(evaluate_here, f"{layout},recompute={mode}") for mode in ("none", "full"))
    assert plain[0][0] == found[0][0]
    for (_, one), (_, other) in zip(plain, found, strict=True):
        assert all(torch.equal(one[name][2], other[name][2]) for name in one)


def kept_bytes(layout: str) -> list[int]:
    """What the autograd graph of a forward keeps, on this rank."""
    config = config_of(layout, *CUT)
    session = session_of(Tiny(kind="scalars"), config)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        session.spread.modules[""](torch.randn(50, 5, dtype=torch.float64))
    return [size for size in kept.values() if size == 50 * WIDTH * 8]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_fewer_activations_are_kept(pool: Pools, layout: str) -> None:
    """Of three blocks the inputs, and what the last layer keeps: the output of the third."""
    counts = [len(pool(2).run(kept_bytes, f"{layout},recompute={mode}")[0]) for mode in ("none", "full")]
    assert counts[1] == 4 < counts[0]
