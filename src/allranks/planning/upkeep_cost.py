"""What samples and checkpoints take of a step: the time that a run waits for them."""

from dataclasses import replace
from typing import Final

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import StepTime
from allranks.planning.setting import Setting
from allranks.upkeep import Upkeep

NO_UPKEEP: Final = Upkeep()


def with_upkeep(work: StepTime, profile: ModelProfile, cluster: Cluster, setting: Setting) -> StepTime:
    """`work` with what a step of so much of it waits for its samples, and its share of a checkpoint.

    Of more work the total is never less.
    """
    if setting.upkeep == NO_UPKEEP:
        return work
    waits = input_seconds(cluster, setting, work.total)
    time = replace(work, input=waits) if waits != work.input else work
    return replace(time, checkpoint=checkpoint_seconds(profile, cluster, setting, time.total))


def input_seconds(cluster: Cluster, setting: Setting, step_seconds: float) -> float:
    """What a step of `step_seconds` waits for its samples; 0 where nobody measured how fast they are loaded.

    Worker processes load while the steps go on (data/loader.py); so does the loop's own thread while a GPU computes. On
    a processor the loop's own thread does one after the other.
    """
    upkeep = setting.upkeep
    if upkeep.sample_seconds is None:
        return 0.0
    samples = setting.global_batch if upkeep.reads_all else setting.micro_steps * setting.micro_batch
    loading = samples * upkeep.sample_seconds / max(1, upkeep.workers)
    if not upkeep.workers and cluster.device.kind == "cpu":
        return loading
    return max(0.0, loading - step_seconds)


def checkpoint_seconds(profile: ModelProfile, cluster: Cluster, setting: Setting, step_seconds: float) -> float:
    """What a step of `step_seconds` has of the time that the run waits for a checkpoint; 0 where that is not known.

    Parameters and optimizer state are written once, spread over all who hold them (`Entry.writer`): each node writes
    its share at the rate of its storage. A save beside the steps is waited for while its copy is made, in the host's
    memory, and where the next one comes due before it is written (docs/how-to/save-without-waiting.md).
    """
    every, rate = setting.upkeep.save_every, cluster.storage_bandwidth
    if not every:
        return 0.0
    whole = state_bytes(profile, setting)
    written = whole / cluster.nodes / rate if rate else 0.0
    if not setting.upkeep.beside:
        return written / every
    return (_copy_seconds(cluster, whole) + max(0.0, written - every * step_seconds)) / every


def copy_bytes(profile: ModelProfile, cluster: Cluster, setting: Setting) -> float:
    """In each host's memory, kept from save to save: what checkpoints beside the steps of GPUs are written from, and
    copies that stay there (checkpointing/stage.py; training/memory_copies.py).
    """
    upkeep = setting.upkeep
    if cluster.device.kind == "cpu":
        return 0.0
    copies = upkeep.state_copies or int(upkeep.beside and (upkeep.save_every > 0 or upkeep.save_seconds > 0))
    if upkeep.state_copies and cluster.nodes > 1:
        copies += 2  # of the two that are there at a time, each file is on two hosts (checkpointing/peers.py)
    return copies * state_bytes(profile, setting) / cluster.nodes


def state_bytes(profile: ModelProfile, setting: Setting) -> float:
    """What a checkpoint holds: parameters, and what is kept for trained ones, each once (checkpointing/stage.py)."""
    trained = 0 if setting.frozen else profile.trained_parameters
    how = setting.mechanisms
    return profile.parameters * how.weight_bytes + trained * how.optimizer_bytes


def _copy_seconds(cluster: Cluster, whole: float) -> float:
    """Of each process's share into the host's memory; there already it is read and written (checkpointing/stage.py)."""
    share = whole / cluster.num_devices
    if cluster.device.kind == "cpu":
        return 2 * share / cluster.device.memory_bandwidth
    return share / cluster.host_bandwidth if cluster.host_bandwidth else 0.0


def left_out(cluster: Cluster, upkeep: Upkeep) -> tuple[str, ...]:
    """What of this the step time does not hold, each with because."""
    found = []
    if upkeep.sample_seconds is None:
        found.append(
            "the step time holds no input, because loading a sample is measured for a Task alone, and on the machine"
            " that it is planned for"
        )
    unknown = f"because {cluster.name} says no storage_gb_per_s (a cluster file's key; doctor --calibrate measures it)"
    if not upkeep.save_every:
        found.append(
            "the step time holds no checkpoint, because no number of steps between two is asked for"
            " (--checkpoint-every): a run saves after checkpoint.seconds then, 30 min by default"
        )
    elif cluster.storage_bandwidth is None:
        held = "of a checkpoint its copy alone" if upkeep.beside else "no checkpoint"
        found.append(f"the step time holds {held}, {unknown}")
    if upkeep.state_copies:
        found.append("the step time holds no copy in memory, because nobody measured how fast this host writes there")
    return tuple(found)
