"""What torch's stage of a pipeline is mended in, one object at a time.

The gravest: a schedule that splits the backward takes the gradients of what the stage has received first, and those of
its parameters later. torch finds the parameters from where their graph meets that of what was received. What the stage
sends on and has made of nothing received (a decoder's embedding behind an encoder, learnt queries) meets it nowhere,
and its parameters would have no gradient, or a part of it, without a word. Such a micro-step has its whole backward at
once. So has one in which the model checkpoints something: the second half is a backward for each group of parameters,
and each of these would compute it again (use_reentrant=False), or none is allowed to (True).

Source: torch/distributed/pipelining/stage.py and _backward.py (get_param_groups) of torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from allranks import fault_points
from allranks.errors import ProcessError


def mend(stage: Any, whole: set[int]) -> None:
    """Have torch's stage do what follows in another way; `whole`: micro-steps whose backward it must not split."""
    # torch 2.11 greets both neighbours, and over gloo no rank can send to itself, as two stages of a V would.
    greetings, here = stage._get_init_p2p_neighbors_ops, stage.group_rank
    stage._get_init_p2p_neighbors_ops = lambda: [op for op in greetings() if op.group_peer != here]
    stage.get_bwd_send_ops = partial(_sent_back, stage.get_bwd_send_ops)
    # Since 2.13 a neighbour's vote may ask for shapes to be tried out, which torch then sends and loads as pickles.
    stage._recv_meta = stage._send_meta = _refuse_to_try_out
    _run_whole(stage, whole)


def goes_past(received: Iterable[torch.Tensor], sent: Iterable[torch.Tensor]) -> bool:
    """Whether anything in `sent` that has a gradient depends on nothing in `received` that has one."""
    meets = {get_gradient_edge(tensor).node for tensor in received if tensor.requires_grad}
    return not all(_reaches(tensor, meets) for tensor in sent if tensor.requires_grad)


def _reaches(tensor: torch.Tensor, meets: set[Node]) -> bool:
    """Whether its graph has one of these nodes."""
    seen, waiting = set[Node](), [get_gradient_edge(tensor).node]
    while waiting:
        node = waiting.pop()
        if node in meets:
            return True
        if node not in seen:
            seen.add(node)
            # The first argument first: by it most of what is added up goes back to where it came from.
            waiting += [before for before, _ in reversed(node.next_functions) if before is not None]
    return False


def _run_whole(stage: Any, whole: set[int]) -> None:
    backward, backward_of_weights = stage.backward_one_chunk, stage.backward_weight_one_chunk

    def both(bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        full = full_backward or bwd_chunk_id in whole
        backward(bwd_chunk_id, loss=loss, full_backward=full, last_backward=last_backward)

    def what_is_left(bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id not in whole:
            backward_of_weights(bwd_chunk_id, last_backward=last_backward)

    stage.backward_one_chunk, stage.backward_weight_one_chunk = both, what_is_left


def _sent_back(ops_of: Callable[[int], list[Any]], micro_step: int) -> list[Any]:
    """A backward's messages as they are read: half of one leaves gradients in any strides, and NCCL sends storage."""
    fault_points.reach("backward")
    for op in (ops := ops_of(micro_step)):
        op.tensor = op.tensor.contiguous()
    return ops


def _refuse_to_try_out(*_: object) -> Any:
    raise ProcessError("another process answers in the place of a stage of this pipeline; see who reaches these ports")
