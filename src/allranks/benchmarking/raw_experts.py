"""Expert parallelism by hand: experts dealt over processes, their tokens by all-to-all (GShard, arXiv 2006.16668)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allranks.models.moe import Experts, MoETransformer

STACKED = ("gate", "up", "down")
EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


class _Travel(Function):
    """Rows to other processes; the gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], taken: list[int], group: Any) -> torch.Tensor:
        ctx.sent, ctx.taken, ctx.group = sent, taken, group
        found = rows.new_empty(sum(taken), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), taken, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = _Travel.apply(gradients[0], ctx.taken, ctx.sent, ctx.group)  # type: ignore[no-untyped-call]
        return back, None, None, None


class SharedExperts(nn.Module):
    """This process's part of a layer's experts, in the place of all of them."""

    def __init__(self, whole: Experts, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.size = group, dist.get_world_size(group)
        rank, number = dist.get_rank(group), whole.num_experts // self.size
        for name in STACKED:
            stacked = whole.get_parameter(name).detach()
            setattr(whole, name, nn.Parameter(stacked[rank * number : (rank + 1) * number].clone()))
        self.own = whole

    def forward(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """[n, hidden], sorted by expert -> the same, through everybody's experts."""
        counts = torch.empty_like(tokens_per_expert)
        dist.all_to_all_single(counts, tokens_per_expert, group=self.group)
        by_rank = counts.view(self.size, -1)
        both = torch.stack((tokens_per_expert.view(self.size, -1).sum(1), by_rank.sum(1))).tolist()
        sent, taken = both
        arrived = _Travel.apply(tokens, sent, taken, self.group)  # type: ignore[no-untyped-call]
        expert = torch.arange(by_rank.shape[1], device=tokens.device).repeat(self.size)
        order = expert.repeat_interleave(counts, output_size=len(arrived)).argsort(stable=True)
        computed = self.own(arrived[order], by_rank.sum(0))
        found: torch.Tensor = _Travel.apply(computed[order.argsort()], taken, sent, self.group)  # type: ignore[no-untyped-call]
        return found


class ExpertParallel:
    """What the loop has to do besides.

    Args:
        model: spread in place, before DDP goes around it.
        ep: processes that share the experts of a layer; those of one rank in their groups hold the same.
    """

    def __init__(self, model: MoETransformer, ep: int) -> None:
        world = dist.get_world_size()
        sharing, _ = dist.new_subgroups_by_enumeration([list(range(at, at + ep)) for at in range(0, world, ep)])
        self._twins, _ = dist.new_subgroups_by_enumeration([list(range(at, world, ep)) for at in range(ep)])
        self._sharing, self._world, self._model = sharing, world, model
        self._layers: list[Any] = [block.feed_forward for block in model.layers]
        for layer in self._layers:
            layer.experts = SharedExperts(layer.experts, sharing)
        numbers = range(len(self._layers))
        names = [f"layers.{at}.feed_forward.experts.own.{name}" for at in numbers for name in STACKED]
        self._experts = [model.get_parameter(name) for name in names]
        self._names = names
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)

    @property
    def experts(self) -> list[nn.Parameter]:
        """The parameters of this process's experts."""
        return list(self._experts)

    def reduce_and_clip(self, max_norm: float) -> None:
        """After the backward: the experts' gradients as the mean that DDP makes of the others', and one norm of all."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self._experts if parameter.grad is not None])
        flat /= self._world
        if dist.get_world_size(self._twins) > 1:
            dist.all_reduce(flat, group=self._twins)
        parts = flat.split([parameter.numel() for parameter in self._experts])
        for parameter, part in zip(self._experts, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        square = flat.square().sum()
        dist.all_reduce(square, group=self._sharing)
        apart = {id(parameter) for parameter in self._experts}
        others = [p.grad for p in self._model.parameters() if id(p) not in apart and p.grad is not None]
        norm = (square + nn.utils.get_total_norm(others).square()).sqrt()
        torch._foreach_mul_([*others, flat], torch.clamp(max_norm / (norm + EPSILON), max=1.0))

    def balance(self) -> None:
        """After the update: every router moves by the tokens that all processes have counted."""
        routers = [layer.router for layer in self._layers]
        counts = torch.stack([router.tokens_per_expert for router in routers])
        dist.all_reduce(counts)
        for router, count in zip(routers, counts, strict=True):
            router.tokens_per_expert.copy_(count)
            router.update_balance()


class ShardedExpertParallel(ExpertParallel):
    """The same under FSDP2: experts are sharded over the ranks that hold the same ones, all else over all ranks.

    Args:
        model: sharded in place.
        mesh: all ranks.
        keep: `fully_shard`'s reshard_after_forward.
    """

    def __init__(self, model: MoETransformer, ep: int, mesh: DeviceMesh, keep: bool | None) -> None:
        super().__init__(model, ep)
        alone = set(self._experts) if ep == self._world else set()
        if not alone:
            twins = DeviceMesh.from_group(self._twins, mesh.device_type)
            for layer in self._layers:
                fully_shard(layer.experts.own, mesh=twins, reshard_after_forward=keep)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=keep, ignored_params=alone)
        self._ep = ep
        self._experts = [model.get_parameter(name) for name in self._names]  # FSDP2 has put its own in their place

    def reduce_and_clip(self, max_norm: float) -> None:
        """After the backward: FSDP2 has made means of its own; no element of a gradient is on two ranks."""
        gradients = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        local = {id(p): grad.to_local() if isinstance(grad, DTensor) else grad for p, grad in gradients}
        # Tokens of all ranks have reached them, and the mean is over those of one place in their groups. A factor for
        # `set_gradient_divide_factor` would be multiplied in while reducing, which gloo cannot.
        torch._foreach_div_([local[id(p)] for p in self._experts if p.grad is not None], self._ep)
        parts = list(local.values())
        square = nn.utils.get_total_norm(parts).square()
        dist.all_reduce(square)
        torch._foreach_mul_(parts, torch.clamp(max_norm / (square.sqrt() + EPSILON), max=1.0))
