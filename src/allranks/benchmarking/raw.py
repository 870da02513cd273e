"""The other side: what a good engineer writes by hand in torch for each strategy.

Sources: torch's tutorials on DDP, FSDP2 and tensor parallelism (docs.pytorch.org/tutorials, of torch 2.13).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from allranks.benchmarking.raw_context import own_positions, sequence_group, share_positions
from allranks.benchmarking.raw_experts import ExpertParallel, ShardedExpertParallel
from allranks.benchmarking.raw_links import Meetings, compress
from allranks.benchmarking.raw_pipeline import pipeline_steps
from allranks.benchmarking.subject import LR, MAX_NORM, SIZES, Tokens, make_model, make_moe, samples_a_step
from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key
from allranks.layout import Layout
from allranks.models.transformer import Decoder

aten = torch.ops.aten
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def raw_steps(layout: Layout, size: str, steps: int, seed: int, device: torch.device) -> Iterator[Callable[[], float]]:
    """`steps` steps of the plain loop; each yields what gives its loss, over the whole batch and per token."""
    mesh = make_mesh(layout, device)
    torch.manual_seed(seed)
    if layout.pp > 1:
        assert mesh is not None
        yield from pipeline_steps(make_model(size), layout, mesh, _loader(layout, mesh, size, steps, seed), device)
        return
    sequence = sequence_group(layout.cp) if layout.cp > 1 else None
    model, experts = build(layout, size, mesh, device, sequence)
    optimizer = make_optimizer(model, layout, () if experts is None else experts.experts)
    group = None if mesh is None or layout.dp * layout.cp == 1 else _data_group(layout, mesh)
    meetings = None if layout.local_sgd is None else Meetings(model, layout)
    for step, sample in enumerate(_loader(layout, mesh, size, steps, seed), 1):
        batch = {name: part.to(device, non_blocking=True) for name, part in sample.items()}
        where = {}
        if sequence is not None:
            batch, where["positions"] = own_positions(batch, sequence, dealt=layout.context == "ring")
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch["x"], **where).flatten(0, 1), batch["y"].flatten())
        loss.backward()
        if experts is None:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            experts.reduce_and_clip(MAX_NORM)
        optimizer.step()
        if experts is not None:
            experts.balance()
        if meetings is not None:
            meetings.after(step)
        told = torch.stack((loss.detach() * batch["y"].numel(), torch.tensor(float(batch["y"].numel()), device=device)))
        if group is not None:
            dist.all_reduce(told, group=group)
        total, count = told.tolist()
        yield partial(float, total / count)


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """The data axes, and beside them stages or parts of layers; None for one process."""
    if layout.world_size == 1:
        return None
    if layout.pp > 1:
        degrees = (layout.pp, layout.dp_replicate, layout.dp_shard)
        return init_device_mesh(device.type, degrees, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    # The ranks of a sequence are copies of the model, or share its parameters as dp_shard's do.
    copies, shards = (layout.cp, 1) if layout.dp_shard == 1 else (1, layout.cp)
    degrees = (layout.dp_replicate * copies, layout.dp_shard * shards, layout.tp)
    return init_device_mesh(device.type, degrees, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def build(
    layout: Layout, size: str, mesh: DeviceMesh | None, device: torch.device, sequence: dist.ProcessGroup | None
) -> tuple[nn.Module, ExpertParallel | None]:
    """The model under the strategy, and what its loop has to do for experts; `sequence` shares each sequence."""
    if layout.ep == 1:
        dense = make_model(size).to(device)
        if sequence is not None:
            share_positions(dense, layout.context, sequence)
        return spread(dense, layout, mesh, device), None
    model = make_moe(size).to(device)
    if layout.fully_sharded:
        assert mesh is not None
        keep = None if layout.sharding == "full" else False
        return model, ShardedExpertParallel(model, layout.ep, mesh["dp_shard"], keep)
    experts = ExpertParallel(model, layout.ep)
    return spread(model, layout, mesh, device), experts


def spread(model: Decoder, layout: Layout, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """The model under the strategy."""
    if layout.tp > 1:
        assert mesh is not None
        cut_layers(model, mesh["tp"])
    if layout.recompute != "none":
        options: dict[str, Any] = {"context_fn": keep_every_second} if layout.recompute == "selective" else {}
        for index, block in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(block, **options)
    if layout.compile == "block":
        for block in model.layers:
            block.compile()
    if mesh is not None and layout.fully_sharded:
        over = mesh["dp_shard"] if layout.dp_replicate == 1 else mesh["dp_replicate", "dp_shard"]
        keep = None if layout.sharding == "full" else False
        for block in model.layers:
            fully_shard(block, mesh=over, reshard_after_forward=keep)
        fully_shard(model, mesh=over, reshard_after_forward=keep)
    elif mesh is not None and layout.replicated and layout.local_sgd is None:
        # With cp these are copies of parts, too.
        copies = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=layout.ddp_bucket_mb,
            gradient_as_bucket_view=True,
        )
        compress(copies, layout)
        return copies
    return model


def make_optimizer(model: nn.Module, layout: Layout, experts: Sequence[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """AdamW; under ZeRO-1 torch's own, which gives whole parameters to ranks."""
    if layout.sharding == "optimizer" and layout.dp > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what it scripts while it is imported
            from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    if experts and layout.fully_sharded:
        # Their shards are of another mesh, or they are whole: a fused step takes one kind.
        others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": list(experts)}]
        return torch.optim.AdamW(groups, lr=LR, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def keep_every_second() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Selective recomputing as TorchTitan (arXiv 2410.06511) does it: attention and every second product are kept."""
    seen = Counter[bool]()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in ATTENTION
        if operation is aten.mm.default:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, second


def cut_layers(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism as torch's tutorial has it for a Llama, the loss on whole logits."""
    along = Shard(1)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers:
        inside = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=along),
            "feed_forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=along),
        }
        parallelize_module(block, mesh, inside)


def _data_group(layout: Layout, mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks whose losses are different parts of the batch's."""
    if layout.tp == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return mesh["dp_replicate", "dp_shard"]._flatten().get_group()


def _loader(
    layout: Layout, mesh: DeviceMesh | None, size: str, steps: int, seed: int
) -> DataLoader[dict[str, torch.Tensor]]:
    samples = steps * samples_a_step(layout)
    # In the order of our stream, so that both sides train on the same batches.
    order = permute(samples, epoch_key(seed, 0), np.arange(samples)).tolist()
    dataset = Subset(Tokens(SIZES[size].seq, samples), order)
    rank = dist.get_rank() // layout.cp if layout.cp > 1 else 0
    if mesh is not None and layout.cp == 1:
        rank = mesh.get_local_rank("dp_replicate") * layout.dp_shard + mesh.get_local_rank("dp_shard")
    sampler: DistributedSampler[dict[str, torch.Tensor]] = DistributedSampler(dataset, layout.dp, rank, shuffle=False)
    return DataLoader(dataset, batch_size=samples_a_step(layout) // layout.dp, sampler=sampler)
