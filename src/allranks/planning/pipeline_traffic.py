"""What stages of a pipeline send: bytes and seconds of one message, and what the busiest rank puts on each link."""

from functools import lru_cache

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import Traffic
from allranks.planning.axis_traffic import Axes
from allranks.planning.collectives import send_seconds
from allranks.planning.pipeline import TWO_SIDED
from allranks.planning.setting import Setting


def message_bytes(profile: ModelProfile, setting: Setting) -> float:
    """Of one activation from a stage to the next, and of its gradient back (2104.04473, section 3.2).

    Stages that share an activation's positions (2205.05198) or send a part each (2104.04473, section 4.1) send 1/tp.
    """
    block = next((b for b in profile.blocks if b.repeated), profile.blocks[0])
    wider = setting.stream_widening(block)
    size = wider * block.input_bytes * setting.micro_batch / setting.cp
    return size / (setting.tp if setting.sequence_parallel or setting.mechanisms.scattered_sends else 1)


def hop_seconds(profile: ModelProfile, setting: Setting, axes: Axes) -> float:
    """Of a micro-step on one rank: what it waits for the messages of all its stages in one direction.

    Interleaved stages send as many times more as a rank has chunks (2104.04473, section 2.2).
    """
    if setting.pp == 1:
        return 0.0
    how = setting.mechanisms
    seconds = send_seconds(axes.pipeline, message_bytes(profile, setting), axes.pipeline.crosses) + how.fixed.hop
    return seconds * setting.chunks * (1 - how.overlap_pipeline)


def pipeline_traffic(
    profile: ModelProfile, cluster: Cluster, setting: Setting, axes: Axes, exposed: float
) -> list[Traffic]:
    """A row for each link that stages send over: what the rank that sends the most there sends in one step
    (2104.04473, section 3.2).

    Args:
        exposed: seconds of a step that a rank waits for messages.
    """
    if setting.pp == 1:
        return []
    inside, between = messages_by_link(setting, cluster.domain)
    size, rows = message_bytes(profile, setting), []
    shown = exposed / max(1, setting.micro_steps * 2 * setting.chunks)
    for number, link, crosses in ((inside, cluster.inside, False), (between, cluster.between, True)):
        if number:
            count = number * setting.micro_steps
            seconds = count * max(shown, send_seconds(axes.pipeline, size, crosses))
            rows.append(Traffic("pp", link.name, count * size, count, seconds, seconds - count * shown))
    return rows


def messages_by_link(setting: Setting, domain: int) -> tuple[int, int]:
    """(Inside a domain, between domains): the most messages that a rank sends there for one micro-step.

    Every stage but the last sends an activation on, every stage but the first a gradient back; from a rank to itself
    there is no message. Ranks of a pipeline lie tp * cp * dp apart (`axes_of`).
    """
    stride = setting.tp * setting.cp * setting.dp
    return _messages(stride, setting.pp, setting.chunks, setting.schedule in TWO_SIDED, domain)


def received_bytes(profile: ModelProfile, setting: Setting, rank: int) -> float:
    """What the stages of a pipeline's rank keep to receive every micro-step of a step into: an activation each but for
    the first stage, a gradient each but for the last (torch/distributed/pipelining/stage.py, `_RecvInfo`).
    """
    if setting.pp == 1 or not setting.mechanisms.keeps_received:
        return 0.0
    last, two_sided = setting.pp * setting.chunks - 1, setting.schedule in TWO_SIDED
    own = [stage for stage in range(last + 1) if _rank_of(stage, setting.pp, two_sided) == rank]
    number = sum((stage > 0) + (stage < last) for stage in own)
    return setting.micro_steps * number * message_bytes(profile, setting)


@lru_cache(maxsize=4096)
def _messages(stride: int, pp: int, chunks: int, two_sided: bool, domain: int) -> tuple[int, int]:
    """The same of ranks that lie `stride` apart. Arithmetic: a count of the borders between stages that each has, in
    every pipeline; those of the first rank do for all where each step is over a border, or borders lie between steps.
    """
    most_inside = most_between = 0
    for first in range(1 if stride >= domain or domain % stride == 0 else stride):
        sent = [[0, 0] for _ in range(pp)]
        for stage in range(pp * chunks - 1):
            here, there = (_rank_of(at, pp, two_sided) for at in (stage, stage + 1))
            if here != there:
                crosses = (first + here * stride) // domain != (first + there * stride) // domain
                sent[here][crosses] += 1
                sent[there][crosses] += 1
        most_inside = max(most_inside, *(inside for inside, _ in sent))
        most_between = max(most_between, *(between for _, between in sent))
    return most_inside, most_between


def _rank_of(stage: int, pp: int, two_sided: bool) -> int:
    """Stages go around the ranks, or there and back (2405.15362)."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if two_sided and turn % 2 else place
