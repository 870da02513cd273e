"""A pipeline's stage where torch takes all that travels for what has a gradient, as torch 2.11 does.

What has none (masks, positions, integers) travels beside torch's stage, behind what has one, in the same messages.
Both halves of a backward that a schedule cuts run at once: cut, 2.11 counts gradients twice, without a word, where two
ways lead to a parameter, and stops at an autograd.Function.

Source: torch/distributed/pipelining/stage.py of torch 2.11 and 2.13.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from allranks.parallel.stage_run import Payload
from allranks.parallel.stage_transport import Sent


@final
class Beside:
    """What goes past torch's stage, by micro-step.

    Args:
        received, sent: all that the stage receives and sends, of both kinds.

    Attributes:
        arrives: what was received, or is received into; stays from step to step.
        leaves: what waits to be sent, or until it has arrived.
    """

    def __init__(self, received: Sequence[Sent], sent: Sequence[Sent], device: torch.device) -> None:
        self._plain = [one for one in received if not one.requires_grad]
        self._learns = [one.requires_grad for one in received], [one.requires_grad for one in sent]
        self._device = device
        self.arrives: dict[int, list[torch.Tensor]] = {}
        self.leaves: dict[int, list[torch.Tensor]] = {}

    def room(self, index: int) -> list[torch.Tensor]:
        """What a micro-step is received into."""
        if index not in self.arrives:
            self.arrives[index] = [one.empty(self._device) for one in self._plain]
        return self.arrives[index]

    def join(self, index: int, learning: Payload) -> Payload:
        """All that the stage has received for a micro-step, from what torch hands it."""
        both = {True: iter(learning), False: iter(self.arrives.get(index, ()))}
        return tuple(next(both[learns]) for learns in self._learns[0])

    def part(self, index: int, payload: Payload) -> Payload:
        """Of all that the stage sends on what torch sends; keeps the rest."""
        pairs = list(zip(payload, self._learns[1], strict=True))
        self.leaves[index] = [tensor for tensor, learns in pairs if not learns]
        return tuple(tensor for tensor, learns in pairs if learns)


@final
class BesideStage(PipelineStage):
    """torch's stage, with what goes past it.

    Args:
        view: the stage's module, which joins and parts.
        beside, before: what goes past this stage, and past the one before it where that is of this rank, too.
        named: what else torch's stage is made with.
    """

    def __init__(self, view: nn.Module, *, beside: Beside, before: Beside | None, **named: Any) -> None:
        super().__init__(view, **named)
        self._beside, self._before = beside, before

    def _peer(self, step: int) -> int:
        return int(self.stage_index_to_group_rank[self.stage_index + step])

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives a micro-step from the stage before."""
        found: list[dist.P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        for into in self._beside.room(fwd_chunk_id):
            found.append(dist.P2POp(dist.irecv, into, group=self.group, group_peer=self._peer(-1)))
        return found

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What sends a micro-step to the stage behind."""
        found: list[dist.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
        for tensor in self._beside.leaves.get(fwd_chunk_id, ()):
            found.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=self._peer(1)))
        return found

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The same where both stages are of one rank."""
        super().set_local_fwd_input(prev_stage_outputs, mb_index)
        assert self._before is not None
        self._beside.arrives[mb_index] = self._before.leaves.pop(mb_index)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives gradients: who sends them has received the micro-step."""
        self._beside.leaves.pop(bwd_chunk_id, None)
        found: list[dist.P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        return found

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The whole backward of a micro-step, also where half of it is asked for; zeros for what it does not reach."""
        _, inputs = self.fwd_cache[bwd_chunk_id]
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last_backward)
        found = zip(self.bwd_cache[bwd_chunk_id], inputs, strict=False)  # those of keywords may be left out
        self.bwd_cache[bwd_chunk_id] = tuple(
            torch.zeros_like(one) if gradient is None and one.requires_grad else gradient for gradient, one in found
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The other half: nothing is left of it."""
