"""torch's own tables of what a pipeline's ranks run in which order, and a clock that plays them."""

from types import SimpleNamespace
from typing import Any, NamedTuple, final

THERE_AND_BACK = ("zbv", "dualpipev")
NAMES = {
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@final
class Visit(NamedTuple):
    """One action of a rank; kind: "FORWARD", "FULL_BACKWARD", or its halves "BACKWARD_INPUT" and "BACKWARD_WEIGHT"."""

    kind: str
    stage: int
    micro_step: int


def orders_of(schedules: Any, name: str, pp: int, chunks: int, micro_steps: int) -> list[list[Visit]]:
    """Of each rank, from torch's module of schedules; what a rank overlaps, torch runs one after the other."""
    made = object.__new__(getattr(schedules, NAMES[name]))
    last, style = pp * chunks, "v" if name in THERE_AND_BACK else "loop"
    made.pp_group_size, made._n_microbatches, made.n_local_stages = pp, micro_steps, chunks
    made._num_stages = made.num_stages = last
    if chunks == 1:
        orders = made._get_pipeline_order()
    else:
        made.number_of_rounds = max(1, micro_steps // pp)
        made.microbatches_per_round = micro_steps // made.number_of_rounds
        made.stage_index_to_group_rank = schedules.generate_stage_to_rank_mapping(pp, last, style=style)
        made.rank_to_stages = schedules.generate_rank_to_stage_mapping(pp, last, style=style)
        orders = {}
        for rank in range(pp):
            made._stages = [SimpleNamespace(stage_index=one) for one in made.rank_to_stages[rank]]
            orders[rank] = made._calculate_single_rank_operations(rank)
    actions = [[a for action in orders[rank] if action for a in (action.sub_actions or (action,))] for rank in orders]
    visits = [[Visit(a.computation_type.name, a.stage_index, a.microbatch_index) for a in order] for order in actions]
    return [[visit for visit in order if visit.kind.startswith(("FORWARD", "BACK", "FULL"))] for order in visits]


def play(
    orders: list[list[Visit]], seconds: tuple[float, float, float], waiting: float = 0.0
) -> tuple[float, list[float]]:
    """When the last rank is done, and how many forwards whose backward is not over each has at most after one.

    Args:
        seconds: of one stage's forward, of the gradients of its input, and of those of its weights.
        waiting: how much more one counts while only its half of weights is left.
    """
    forward, backward, weight = seconds
    lengths = {"FORWARD": forward, "BACKWARD_INPUT": backward, "BACKWARD_WEIGHT": weight}
    lengths["FULL_BACKWARD"] = backward + weight
    changes = {"FORWARD": 1.0, "BACKWARD_INPUT": waiting, "BACKWARD_WEIGHT": -1.0 - waiting, "FULL_BACKWARD": -1.0}
    last = max(visit.stage for order in orders for visit in order)
    done: dict[tuple[bool, int, int], float] = {}
    clock, places = [0.0] * len(orders), [0] * len(orders)
    live, most = [0.0] * len(orders), [0.0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and _needed(order[places[rank]], last) <= done.keys():
                visit = order[places[rank]]
                start = max([clock[rank], *(done[needed] for needed in _needed(visit, last))])
                clock[rank] = start + lengths[visit.kind]
                if visit.kind != "BACKWARD_WEIGHT":
                    done[visit.kind == "FORWARD", visit.stage, visit.micro_step] = clock[rank]
                live[rank] += changes[visit.kind]
                if visit.kind == "FORWARD":  # a backward has what it works with besides
                    most[rank] = max(most[rank], live[rank])
                places[rank] += 1
        assert places != before, "a rank waits for itself"
    return max(clock), most


def _needed(visit: Visit, last: int) -> set[tuple[bool, int, int]]:
    """(Whether it is a forward, stage, micro-step) of what another stage, or this one, has to have done before."""
    if visit.kind == "FORWARD":
        return {(True, visit.stage - 1, visit.micro_step)} if visit.stage else set()
    if visit.kind == "BACKWARD_WEIGHT":
        return set()
    return {(False, visit.stage + 1, visit.micro_step) if visit.stage < last else (True, last, visit.micro_step)}
