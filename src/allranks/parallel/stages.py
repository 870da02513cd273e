"""What a rank of a pipeline has: its stages, how they run, and what it shares with the ranks of other stages.

A tied weight that two stages compute with (an embedding that is the head, too) is held by both. Each has the gradient
of its own use; their sum is the gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.layout_refusals import SPLIT_BACKWARD
from allranks.parallel import stage_schedule
from allranks.parallel.average import average_gradients
from allranks.parallel.initial import Source
from allranks.parallel.mesh import Mesh
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_plan import Count, plan_stages
from allranks.parallel.stage_schedule import Scheduler
from allranks.parallel.stage_transport import Transport
from allranks.parallel.waiting import wait_of_world
from allranks.verdict import Decision


@final
@dataclass
class Stages:
    """The pipeline of a run, as one rank has it.

    Attributes:
        pipeline: the model's stages.
        scheduler: runs them.
        group: the ranks of all stages.
        device: where their collectives run; gradients may wait in the host's memory.
        told_elsewhere: ids of parameters that another rank along pp holds, too, which counts them in sums.
        trainable_names: logical names over all stages.
    """

    pipeline: Pipeline
    scheduler: Scheduler
    group: dist.ProcessGroup
    device: torch.device
    trainable_names: tuple[str, ...]
    told_elsewhere: frozenset[int] = frozenset()
    _ties: list[tuple[dist.ProcessGroup, list[torch.Tensor]]] = field(default_factory=list)

    def tie(self, tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> None:
        """Find what several stages hold, once every tensor has its place; collective over the world."""
        names: dict[frozenset[int], list[str]] = {}
        everywhere = frozenset(range(mesh.layout.pp))
        for name in self.trainable_names:
            ranks = self.pipeline.ranks.get(name, everywhere)
            if len(ranks) > 1:
                names.setdefault(ranks, []).append(name)
        mine = mesh.coordinate("pp")
        elsewhere: set[int] = set()
        for ranks in sorted(names, key=sorted):
            # A tied parameter has one name here already: trainable_names has no aliases.
            group = _group_over(mesh, ranks)
            if mine in ranks and group is not None:
                held = [tensors[name] for name in names[ranks]]
                self._ties.append((group, held))
                elsewhere |= set(map(id, held)) if mine != min(ranks) else set()
        self.told_elsewhere = frozenset(elsewhere)

    def reduce_shared(self) -> None:
        """Sum the gradients of what several stages hold, over those stages; collective along pp."""
        for group, parameters in self._ties:
            average_gradients(parameters, [group], divisor=1, device=self.device)


def cut_stages(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    device: torch.device,
    blocks: Sequence[str],
    split_before: Sequence[str],
    decisions: list[Decision],
    count: Count | None = None,
) -> Stages | None:
    """The stages of the user's module, as it was built; None where the layout has no pipeline.

    Args:
        count: counts the operations of its pieces; None where there is no sample.

    Raises:
        LayoutError: it cannot be cut into so many, there are several modules, or a rank would have nothing to learn.
    """
    layout = mesh.layout
    if layout.pp == 1:
        return None
    if list(modules) != [""]:
        raise LayoutError(f"pp={layout.pp} cuts one module, and model() returned {len(modules)}: use another layout")
    module = modules[""]
    _leave_nested_tensors(module)
    plan = plan_stages(module, layout.stage_ranks, blocks, split_before, count)
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            names.setdefault(id(parameter), name)
    pipeline = Pipeline(module, plan, mesh)
    everywhere = frozenset(range(layout.pp))
    learning = frozenset(rank for name in names.values() for rank in pipeline.ranks.get(name, everywhere))
    if names and learning < everywhere:
        raise LayoutError(
            f"pp={layout.pp} leaves process {min(everywhere - learning)} of a pipeline with frozen parameters only: "
            "cut the model elsewhere with hints().split_before, or use another layout"
        )
    scheduler = Scheduler(pipeline, Transport(pipeline, mesh, device), mesh, device)
    begin = ", ".join(plan.points)
    what = f"{plan.num_stages} stages over pp={layout.pp} begin at the model's start, {begin}"
    decisions.append(Decision(what, f"{plan.because}; {plan.balanced}"))
    if layout.schedule in SPLIT_BACKWARD and not stage_schedule.KNOWS_GRADIENTS:
        told = f"warning: schedule={layout.schedule} runs both halves of a backward at once, and saves no waits"
        wrong = (
            "torch before 2.13 counts gradients twice where two ways lead to a parameter, once the halves come apart"
        )
        decisions.append(Decision(told, f"{wrong}, and this is {torch.__version__}"))
    return Stages(pipeline, scheduler, mesh.group("pp"), device, tuple(names.values()))


def _leave_nested_tensors(module: nn.Module) -> None:
    """Keep torch's encoders from nested tensors, which they make of padded sequences in evaluation.

    Those have no shape that a stage could tell the next one, and no zeros stand in for them.
    """
    for member in module.modules():
        if isinstance(member, nn.TransformerEncoder):
            member.use_nested_tensor = False


def count_for_all(count: Count | None, source: Source, device: torch.device) -> Count | None:
    """What rank 0 counts, whose samples may be others than elsewhere; collective over the world when it is called.

    In a rehearsal, whose ranks have no others to ask, each counts for itself.
    """
    if count is None or source.group is None:
        return count

    def ask(module: nn.Module, names: Sequence[str]) -> list[float]:
        costs, failed = [0.0] * (len(names) + 1), "on process 0"
        if dist.get_rank() == 0:
            try:
                costs = count(module, names)
            except TaskError as error:
                failed = str(error)
        told = torch.tensor(costs, dtype=torch.float64, device=device)
        dist.broadcast(told, 0)
        if not told.any():
            raise TaskError(failed)
        found: list[float] = told.tolist()
        return found

    return ask


def _group_over(mesh: Mesh, pp_ranks: Collection[int]) -> dist.ProcessGroup | None:
    """The ranks at these coordinates along pp that are alike in all else; every rank makes every such group."""
    if len(pp_ranks) == mesh.layout.pp:
        return mesh.group("pp")
    assert mesh.device_mesh is not None
    columns = mesh.device_mesh.mesh[sorted(pp_ranks)].reshape(len(pp_ranks), -1).T
    rows = [sorted(column) for column in columns.tolist()]
    mine, _ = dist.new_subgroups_by_enumeration(rows, timeout=wait_of_world())
    found: dist.ProcessGroup | None = mine
    return found
