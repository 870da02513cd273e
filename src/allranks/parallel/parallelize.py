"""The one code path that applies a Layout to the user's modules (law 10)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from allranks.hints import TensorStyle
from allranks.parallel.alone import check_alone, check_whole_positions
from allranks.parallel.balance import find_balances
from allranks.parallel.batchnorm import BatchNorms, Mode, take_over
from allranks.parallel.block_modes import change_blocks, changes_blocks
from allranks.parallel.blocks import Unit, describe_units, find_blocks, group_units
from allranks.parallel.checks import cast, check_apart, check_kinds, check_tables, start_training
from allranks.parallel.context import Context, share_sequences
from allranks.parallel.data_parallel import split_over_devices
from allranks.parallel.ddp_hook import make_hook
from allranks.parallel.expert import ExpertCutter, ExpertGradients
from allranks.parallel.extra_state import tell_extra_state
from allranks.parallel.float8 import lower_linears
from allranks.parallel.host_parameters import choose_offload, describe_offload
from allranks.parallel.identity import identify
from allranks.parallel.initial import Build, Placer, Source, build_modules, check_same_structure, hear_of_full_builds
from allranks.parallel.marks import check_hooks, give_marks, note_marks
from allranks.parallel.mesh import Mesh
from allranks.parallel.optimizer_shard import RowShards
from allranks.parallel.optional import check_entered, find_optional, give_zeros, never_left_out
from allranks.parallel.path import Path
from allranks.parallel.placement_plan import begin_placement
from allranks.parallel.precision import Precision
from allranks.parallel.replicate import replicate
from allranks.parallel.shard import find_scalars, shard
from allranks.parallel.spread import Spread
from allranks.parallel.stage_plan import Count
from allranks.parallel.stages import Stages, count_for_all, cut_stages
from allranks.parallel.tensor import Cut, TensorCutter
from allranks.parallel.tensor_plan import CUT, plan_tensor
from allranks.parameter_map import ParameterMap
from allranks.verdict import Decision


@dataclass(frozen=True)
class Blocks:
    """By module, the names of its blocks.

    Attributes:
        changed: those that are recomputed, offloaded or compiled one by one.
        gathered: those that are sharded one by one, without what a forward may leave out.
        hints: `hints().blocks`.
    """

    changed: dict[str, list[str]]
    gathered: dict[str, list[str]]
    hints: Sequence[str]


def parallelize(
    build: Build,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    *,
    source: Source,
    seed: Callable[[], None],
    blocks: Sequence[str] = (),
    split_before: Sequence[str] = (),
    tensor: Mapping[str, TensorStyle] = MappingProxyType({}),
    loss_parallel: bool = False,
    batchnorm: Mode | None = None,
    optional: Sequence[str] = (),
    ddp: bool = True,
    find_unused: bool = False,
    training: bool = False,
    path: Path | None = None,
    count: Count | None = None,
) -> Spread:
    """Build the user's modules and spread them over `mesh`; collective.

    Args:
        build, source: the user's `model()`, and who has the initial values.
        seed: seeds the generators, called before `build` (law 5).
        blocks, split_before, tensor, loss_parallel, optional, batchnorm (unless the layout says it): of `hints()`.
        ddp: whether the backward reduces the gradients of replicated modules; False where the caller does.
        find_unused: whether a backward may leave other parameters than those without gradient.
        path, count: notes which sharded units forwards enter (None: one of its own); counts what stages compute.
        training: whether a model that comes in evaluation mode is put into training mode, said so.

    Raises:
        LayoutError: the modules cannot be spread in this way.
        TaskError: model() is no model, or not the same on every rank.
    """
    modules, decisions = _prepare(*build_modules(build, source, seed), precision, blocks, device, training=training)
    check_same_structure(modules, source, device)
    hear_of_full_builds(decisions, source, device)
    stages = cut_stages(modules, mesh, device, blocks, split_before, decisions, count_for_all(count, source, device))
    placer, path = Placer(device, source, contiguous=mesh.layout.fully_sharded), path or Path()
    marks, (norms, context) = note_marks(modules), _join_ranks(modules, mesh, batchnorm, decisions, path)
    cuts = _cut_tensors(modules, mesh, tensor, placer, decisions, loss_parallel, optional) if mesh.layout.tp > 1 else {}
    experts = _cut_experts(modules, mesh, placer, cuts, decisions, path) if mesh.layout.ep > 1 else None
    balances = find_balances(modules, mesh.gradient_group)
    blocks_of = _find_blocks(modules, mesh, blocks, optional, stages, norms, decisions)
    units = _place_by_units(modules, mesh, precision, placer, blocks_of, stages, path, decisions, experts)
    entries, tensors = identify(modules, units, mesh, cuts, {} if stages is None else stages.pipeline.ranks)
    give_marks(marks, tensors, modules.values())
    if stages is not None:
        stages.tie(tensors, mesh)
        norms.keep_only(entries)
    else:
        modules = _copy(modules, mesh, device, decisions, ddp=ddp, find_unused=find_unused)
    hook = make_hook(modules, mesh, entries, tensors, decisions) if mesh.layout.ddp_hook != "none" else None
    cut_over = {id(tensors[name]): (mesh.group(cut.axis),) for name, cut in cuts.items() if name in entries}
    who = ParameterMap(entries), tensors, tuple(decisions), find_unused, path, cut_over, norms, stages
    spread = Spread(modules, mesh, precision, device, *who, context=context, _scalars=find_scalars(tensors, mesh))
    spread.balances, spread.experts, spread.hook, spread.placement = balances, experts, hook, placer.placement
    spread.row_shards = _share_rows(spread, mesh, experts)
    return spread


def _share_rows(spread: Spread, mesh: Mesh, experts: ExpertGradients | None) -> RowShards | None:
    """What each rank updates of every parameter, where the optimizer is sharded."""
    if mesh.layout.sharding != "optimizer" or mesh.layout.dp_shard == 1:
        return None
    return RowShards(spread.trainable(), spread.map, mesh, experts.parameters if experts else ())


def _copy(
    modules: dict[str, nn.Module],
    mesh: Mesh,
    device: torch.device,
    decisions: list[Decision],
    *,
    ddp: bool,
    find_unused: bool,
) -> dict[str, nn.Module]:
    """Whole copies of the modules, kept equal on other ranks or made anew on this one's devices."""
    if mesh.layout.replicated and ddp:
        return {which: replicate(module, mesh, device, find_unused=find_unused) for which, module in modules.items()}
    if mesh.layout.kind == "data_parallel":
        return split_over_devices(modules, torch.cuda.device_count(), decisions, device)
    return modules


def _prepare(
    modules: dict[str, nn.Module],
    decisions: list[Decision],
    precision: Precision,
    blocks: Sequence[str],
    device: torch.device,
    *,
    training: bool,
) -> tuple[dict[str, nn.Module], list[Decision]]:
    for which, module in modules.items():
        if training:
            start_training(which, module, decisions)
        cast(module, precision, decisions)
        check_kinds(module)
        tell_extra_state(which, module, decisions)
    if precision.lowers_linears:
        modules = lower_linears(modules, blocks, device, decisions)
    return modules, decisions


def _find_blocks(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    hints: Sequence[str],
    optional: Sequence[str],
    stages: Stages | None,
    norms: BatchNorms,
    decisions: list[Decision],
) -> Blocks:
    """What is gathered, recomputed or compiled as one; what a forward may leave out gets its zeros from here on."""
    layout = mesh.layout
    needed = bool(optional) or layout.fully_sharded or changes_blocks(layout)
    found = find_blocks(modules, hints) if needed else {which: [] for which in modules}
    left_out = find_optional(modules, optional)
    entered = {which: never_left_out(names, left_out[which]) for which, names in found.items()}
    if stages is not None:
        check_entered(stages.pipeline.plan.points, left_out[""])
    if optional:
        check_alone(modules, left_out, mesh, norms)
        for which, module in modules.items():
            give_zeros(module, left_out[which], entered[which])
        number = sum(map(len, left_out.values()))
        what = f"{number} modules get zero gradients where a forward leaves them out"
        decisions.append(Decision(what, "hints().optional names them"))
    return Blocks(found, entered if layout.fully_sharded else {}, hints)


def _place_by_units(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    precision: Precision,
    placer: Placer,
    blocks: Blocks,
    stages: Stages | None,
    path: Path,
    decisions: list[Decision],
    experts: ExpertGradients | None,
) -> dict[str, list[Unit]]:
    """Change blocks as the layout says, give every tensor its place, and cut it there where it is sharded."""
    layout, units = mesh.layout, dict[str, list[Unit]]()
    choose_offload(layout, placer.device)  # before anything is built upon it
    changed, gathered = blocks.changed, blocks.gathered
    if stages is not None:
        placer.absent = stages.pipeline.is_absent
        placer.place_all(modules.values())
        runs = stages.pipeline.runs
        changed, gathered = ({w: list(filter(runs, names)) for w, names in of.items()} for of in (changed, gathered))
    if layout.kind == "placement":
        placer.placement = begin_placement(modules, mesh, placer.device, blocks.hints, decisions)
    decisions += change_blocks(modules, changed, layout, placer.device)
    if layout.fully_sharded:
        units = _shard_all(modules, mesh, precision, placer, gathered, path, experts)
        decisions += [describe_units(name, cut, bool(blocks.hints)) for name, cut in units.items()]
        decisions += describe_offload(layout)
    for module in modules.values():
        placer.place(module)
    if placer.placement is not None:
        placer.placement.finish()
    return units


def _join_ranks(
    modules: Mapping[str, nn.Module], mesh: Mesh, batchnorm: Mode | None, decisions: list[Decision], path: Path
) -> tuple[BatchNorms, Context | None]:
    """Let what looks at other samples, or at other positions, look at those of other ranks, or refuse it."""
    for which, module in modules.items():
        check_tables(module, mesh)
        check_hooks(which, module, mesh.layout)
    return take_over(modules, mesh, batchnorm, decisions, path), share_sequences(modules, mesh, decisions)


def _shard_all(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    precision: Precision,
    placer: Placer,
    found: Mapping[str, Sequence[str]],
    path: Path,
    experts: ExpertGradients | None,
) -> dict[str, list[Unit]]:
    check_apart(modules, mesh)
    units = {which: group_units(module, found[which]) for which, module in modules.items()}
    waits = choose_offload(mesh.layout, placer.device)
    for which, module in modules.items():
        sharded = () if experts is None else experts.sharded
        shard(module, units[which], mesh, precision.fsdp_policy(), placer, path, waits, sharded)
    return units


def _cut_tensors(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    hints: Mapping[str, TensorStyle],
    placer: Placer,
    decisions: list[Decision],
    loss_parallel: bool,
    optional: Sequence[str],
) -> dict[str, Cut]:
    plan = plan_tensor(modules, hints, mesh.layout.tp, loss_parallel=loss_parallel)
    if mesh.layout.pp > 1 and plan.sequence:
        # What passes from stage to stage is whole.
        plan = replace(plan, styles={name: style for name, style in plan.styles.items() if style != "sequence"})
        decisions.append(Decision("activations are not cut along the sequence", "pp passes whole ones on"))
    if plan.sequence:
        check_whole_positions(optional, mesh.layout.tp)
    cutter = TensorCutter(modules, plan, mesh.group("tp"))
    cutter.install()
    num_cut = sum(style in CUT for style in plan.styles.values())
    along = ", and activations along the sequence" if plan.sequence else ""
    decisions.append(Decision(f"{num_cut} layers are cut over tp={mesh.layout.tp}{along}", plan.because))
    decisions += cutter.describe_logits()
    placer.cut = cutter
    return cutter.find_cuts()


def _cut_experts(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    placer: Placer,
    cuts: dict[str, Cut],
    decisions: list[Decision],
    path: Path,
) -> ExpertGradients:
    """Cut them after what else cuts parameters; how goes into `cuts`."""
    cutter = ExpertCutter(modules, mesh)
    decisions.append(cutter.install(modules, path))
    members = list(cutter.members.values())
    cut_before, placer.apart = placer.cut, () if cutter.sharded else members
    placer.cut = lambda built, placed: cutter(built, cut_before(built, placed))
    cuts |= cutter.find_cuts()
    return ExpertGradients(members, mesh, sharded=cutter.sharded)
