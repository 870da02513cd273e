"""A whole dry run: the ranks that were asked for, what they have in common, and whether they fit."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from allranks.attention_windows import say_windows
from allranks.cluster import Cluster, Device
from allranks.config import Config
from allranks.layout import Layout
from allranks.planning.host_traffic import host_capacity_bytes, vendors_host
from allranks.planning.room import shared_with_host, usable_bytes
from allranks.rehearsal import Finding, RankRehearsal, Rehearsal
from allranks.rehearsing.comparing import compare_ranks
from allranks.rehearsing.crossings import Crossings
from allranks.rehearsing.dryrun import World, rehearse_rank
from allranks.rehearsing.exchanges import compare_exchanges, find_circle, list_unmatched, next_peer
from allranks.rehearsing.hurried import counting_once
from allranks.rehearsing.named import Named
from allranks.rehearsing.refusals import Unrehearsable
from allranks.task import Task

CONTEXT_BYTES = 2.0e9
"""Of the driver, the libraries and their communicators on a GPU: what the planner counts (planning/mechanisms.py)."""
SLACK = 0.12
"""Of what comes and goes in a step: by how much the allocator's blocks exceed it, as in the planner."""
REPEATED_SLACK, RESTING_SLACK = 0.2, 0.09
"""The same where blocks are computed again or wait on the host, and of what stays: their tensors leave gaps between
those that stay. Fitted to torch.cuda.max_memory_reserved on an H200 (docs/explanation/measured.md)."""
MOST_PEERS = 4
"""Ranks that are rehearsed beyond those that were chosen, for the other ends of messages."""
COMING_AND_GOING = ("activations", "logits", "gathered", "communication")
UNREHEARSED = (
    "kernels of CUDA: operators were checked as a processor's",
    "devices: a tensor that stays on the processor (x.cpu()) is not noticed: here all are there",
    "NCCL: its limits, its buffers and its time-outs",
    "values: overflow, NaN, what the model learns",
    "speed: `allranks plan` estimates it",
    "batches other than the first: longer samples take more",
    "samples: losses that couple them, buffers learnt from own ones (the start looks for both)",
    "what is no part of a step: evaluation, checkpoints, copies in memory, sentinels",
)
WITH_A_HOST = "copies to and from the host: here each ends at once, there what waits for the link stays longer"
OF_COPIES = "tp: the broadcast, on GPUs alone, of the gradients of what tp leaves whole (its bytes and its messages)"


@final
@dataclass(frozen=True)
class Question:
    """What is to be rehearsed.

    Attributes:
        model: its name, for people.
        full: whether every block is traced.
        follow: whether a few more ranks are rehearsed, to which these send, or from which they receive.
    """

    model: str
    task: Task
    config: Config
    cluster: Cluster
    layout: Layout
    ranks: tuple[int, ...]
    full: bool = False
    follow: bool = False


def rehearse(question: Question, tell: Callable[[str], None] = lambda line: None) -> Rehearsal:
    """One step of each rank.

    Raises:
        AllranksError: the step would be refused, or fail, or cannot be rehearsed; the line is named.
    """
    cluster, layout = question.cluster, question.layout
    on_cuda = cluster.device.kind == "cuda"
    world = World(layout, max(1, layout.world_size // cluster.nodes), on_cuda)
    ranks: dict[int, RankRehearsal] = {}
    crossings = Crossings(layout)
    with counting_once():

        def rehearse_one(rank: int) -> None:
            tell(f"rank {rank} of {layout.world_size}")
            ranks[rank] = rehearse_rank(
                question.task, question.config, world, rank, full=question.full, crossings=crossings
            )

        for rank in question.ranks:
            rehearse_one(rank)
        silent = _follow(ranks, rehearse_one) if question.follow else ()
    there = host_capacity_bytes(cluster)
    return Rehearsal(
        model=question.model,
        cluster=cluster.name,
        layout=str(layout),
        world_size=layout.world_size,
        ranks=ranks,
        capacity_bytes=usable_bytes(cluster.device),
        margin_bytes=margin_bytes(ranks.values(), layout) if on_cuda else process_bytes(cluster.device),
        findings=(*crossings.findings, *_compare(ranks)),
        decisions=tuple(_describe(question, ranks)),
        unrehearsed=(
            *UNREHEARSED[0 if on_cuda else 3 :],
            *((OF_COPIES,) if on_cuda and layout.tp > 1 else ()),
            *((WITH_A_HOST,) if layout.offload != "none" else ()),
            *list_unmatched(ranks),
            *silent,
            *_left_out(ranks, layout),
        ),
        host_capacity_bytes=None if there is None else there / world.per_node,
        host_bandwidth=cluster.host_bandwidth,
        between_stages=crossings.bytes_to_stages(),
    )


def margin_bytes(ranks: Collection[RankRehearsal], layout: Layout) -> float:
    """What has to stay free on a GPU beside the largest peak, so that the rank that needs most with its own fits."""
    needed = max(told.peak_bytes + fragment_bytes(told, layout) for told in ranks)
    return CONTEXT_BYTES + needed - max(told.peak_bytes for told in ranks)


def process_bytes(device: Device) -> float:
    """What a process on a processor holds before it has a model; as for the planner, a GPU's where nobody knows."""
    return CONTEXT_BYTES if device.context_bytes is None else device.context_bytes


def fragment_bytes(told: RankRehearsal, layout: Layout) -> float:
    """What the allocator of a GPU is taken to reserve beyond the peak: a part of what comes and goes."""
    coming = sum(told.by_category.get(name, 0) for name in COMING_AND_GOING)
    if layout.recompute == "none" and layout.offload not in ("activations", "all"):
        return SLACK * coming
    return REPEATED_SLACK * coming + RESTING_SLACK * (told.peak_bytes - coming)


def _compare(ranks: Mapping[int, RankRehearsal]) -> Sequence[Finding]:
    """Where the rehearsed ranks would not come to an end together."""
    found = [*compare_ranks(ranks), *compare_exchanges(ranks)]
    circle = None if found else find_circle(ranks)
    return [circle] if circle is not None else found


def _follow(ranks: dict[int, RankRehearsal], rehearse_one: Callable[[int], None]) -> Sequence[str]:
    """Rehearse the other ends of the user's messages too, as many as MOST_PEERS; says of which one nothing is known."""
    silent: tuple[str, ...] = ()
    chosen = len(ranks)
    while not silent and len(ranks) < chosen + MOST_PEERS and (peer := next_peer(ranks)) is not None:
        try:
            rehearse_one(peer)
        except Unrehearsable as error:
            silent = (f"rank {peer}, with which others exchange messages: {error}",)
    for rank in sorted(ranks):
        ranks[rank] = ranks.pop(rank)
    return silent


def _left_out(ranks: Collection[int], layout: Layout) -> Sequence[str]:
    if len(ranks) == layout.world_size:
        return ()
    said = ", ".join(map(str, ranks))
    what = f"ranks other than {said}" if len(ranks) > 1 else f"ranks other than rank {said}"
    return (f"{what}: whether they take the same way (--ranks all)",)


def _describe(question: Question, ranks: dict[int, RankRehearsal]) -> Sequence[str]:
    told = next(iter(ranks.values()))
    found = []
    if told.traced < told.blocks:
        because = "blocks of one kind do the same; --full-trace traces all"
        found.append(f"{told.traced} of {told.blocks} blocks were traced, because {because}")
    if question.layout.compile != "none":
        found.append("blocks run uncompiled, because compiled code cannot be traced: what it saves is not counted")
    if isinstance(question.task, Named) and (shape := question.task.shape()).profile().has_windows:
        said = say_windows(shape.windows, shape.layers)
        found.append(
            f"{said}, and are rehearsed with full attention, because allranks' module has no windows: its FLOPs are"
            " more than a kernel for windows computes (`allranks plan` counts those), its memory is the same"
        )
    if words := shared_with_host(question.cluster):
        found.append(words)
    if (words := vendors_host(question.cluster)) and any(one.host_peak_bytes for one in ranks.values()):
        found.append(words)
    return found
