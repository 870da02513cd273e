"""The decision guide of the field, in words, and with the numbers of one plan in it."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

from allranks.model_profile import Block, ModelProfile
from allranks.plan import Estimate, Plan
from allranks.planning.question import MakeProfile
from allranks.planning.setting import setting_of
from allranks.units import format_bytes, format_count

WIDTH = 100
LISTED_OPERATIONS = 3


@final
@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the guide: where it is taken, what is used from there on, what that costs.

    Attributes:
        family: of a plan whose numbers belong here; "" where no plain strategy does.
    """

    where: str
    use: str
    costs: str
    family: str = ""


GUIDE: tuple[Turn, ...] = (
    Turn(
        "One device holds weights, gradients, the optimizer's state and the activations, and is fast enough",
        "single",
        "nothing is sent",
    ),
    Turn(
        "It fits on one device, but takes too long",
        "ddp",
        "one all-reduce of all gradients a step, mostly behind the last backward",
        "ddp",
    ),
    Turn(
        "It fits but for the optimizer's state",
        "dp_shard=N,sharding=optimizer",
        "the gradients are reduced and the new weights gathered: as much is sent as under ddp",
        "zero-1",
    ),
    Turn(
        "It does not fit",
        "fsdp (dp_shard=*); with memory to spare also sharding=grad_op",
        "each block is gathered before its forward and backward: half as much again as ddp sends, for every forward",
        "fsdp",
    ),
    Turn(
        "Under fsdp the step waits for the links between nodes",
        "hsdp: shared inside a node, copied across nodes",
        "a device holds a node's share of the state; gathers stay on the fast links",
        "hsdp",
    ),
    Turn(
        "The activations do not fit",
        "a smaller micro_batch, then recompute=selective, recompute=full, offload=activations",
        "recompute=full repeats the forward, a quarter of all the work; offload moves over the host's link",
    ),
    Turn(
        "One sample's activations do not fit, because it is long",
        "cp inside the node",
        "keys and values, or positions against heads, are exchanged in every attention",
        "cp",
    ),
    Turn(
        "The batch has too few samples for so many data-parallel ranks, or a block is too large to be gathered",
        "tp inside the node, where the links are fast; never across nodes",
        "two all-reduces of the activations in each block and direction, which nothing hides",
        "tp",
    ),
    Turn(
        "That is still too few samples, too large, or the links between nodes are too slow for gathers",
        "pp across the nodes, with several micro-steps for each stage",
        "(stages - 1) of (micro-steps + stages - 1) of the step are a bubble; schedule=interleaved divides it",
        "pp",
    ),
    Turn(
        "The model has experts",
        "ep over data-parallel ranks of one node",
        "tokens travel to their experts and back, twice a block and direction",
    ),
)


def render_guide() -> str:
    """The guide without a model, for 100 columns."""
    lines = ["Which layout? Take the first line that is true; each goes with those above it.", ""]
    for number, turn in enumerate(GUIDE, 1):
        lines += _fill(f"{number:2}. ", f"{turn.where}:")
        lines += _fill("      use ", turn.use) + _fill("      it costs: ", turn.costs)
    more = "with your numbers: allranks plan NAME --cluster C --explain"
    return "\n".join([*lines, "", f"The same {more}"])


def guide_document() -> dict[str, Any]:
    """The guide without a model, as data: `guide`."""
    return {"guide": [asdict(turn) for turn in GUIDE]}


def explanation_document(plan: Plan, make_profile: MakeProfile) -> dict[str, Any]:
    """`guide`, each turn with the numbers of `plan` in words, and `blocks`; without them where all is refused."""
    leading = plan.leading
    if leading is None:
        return {"guide": [{**asdict(turn), "numbers": []} for turn in GUIDE], "blocks": []}
    found = leading.estimate
    profile = make_profile(plan.seq or None, found.choice.precision)
    turns = [{**asdict(turn), "numbers": list(_numbers(turn, plan, profile, found))} for turn in GUIDE]
    gather = setting_of(found.choice).mechanisms.gather_bytes
    return {"guide": turns, "blocks": [_block_document(block, gather) for block in _largest_first(profile)]}


def _block_document(block: Block, gather_bytes: float) -> dict[str, Any]:
    """One of `count` alike, whole, for one sample."""
    return {
        "unit": block.name,
        "count": block.count,
        "parameters": block.parameters,
        "gathered_bytes": block.parameters * gather_bytes,
        "kept_bytes": block.saved_bytes,
        "kept_bytes_recompute_full": _kept_in_full(block),
        "kept_most_by": _keepers(block),
    }


def render_explanation(plan: Plan, make_profile: MakeProfile) -> str:
    """The guide with the numbers of `plan`, then the blocks of its model with what each holds."""
    leading = plan.leading
    if leading is None:
        return "The guide has no numbers: every layout is refused."
    profile = make_profile(plan.seq or None, leading.estimate.choice.precision)
    lines = ["The decision guide with these numbers", ""]
    for number, turn in enumerate(GUIDE, 1):
        lines += _fill(f"{number:2}. ", f"{turn.use}: {turn.where.lower()}?")
        for line in _numbers(turn, plan, profile, leading.estimate):
            lines += _fill("      ", line)
    verdict = "so" if plan.best else "nothing fits; the closest"
    lines += _fill("", f"{verdict}: {leading.estimate.choice.layout}: {leading.because}")
    return "\n".join([*lines, "", *_blocks(profile, leading.estimate)])


def _numbers(turn: Turn, plan: Plan, profile: ModelProfile, leading: Estimate) -> Iterator[str]:
    if turn.use == "single":
        how = setting_of(leading.choice).mechanisms
        each = how.weight_bytes + how.gradient_bytes + how.optimizer_bytes
        size = each * profile.parameters
        answer = "yes, without the activations" if size < leading.capacity_bytes else "no"
        yield (
            f"{format_count(profile.parameters)} parameters of {each:.0f} bytes (weights, gradients, two moments) are"
            f" {format_bytes(size)} of {format_bytes(leading.capacity_bytes)}: {answer}"
        )
        return
    if turn.use.startswith("ep"):
        yield f"{profile.experts} experts a layer" if profile.experts else "it has none"
        return
    if not turn.family:
        of = leading.choice
        yield (
            f"here micro_batch {of.micro_batch}, recompute={of.layout.recompute}, offload={of.layout.offload}:"
            f" activations {format_bytes(leading.memory.activations)}, logits {format_bytes(leading.memory.logits)}"
        )
        return
    found = [other for other in plan.others if other.family == turn.family]
    yield from (f"{other.estimate.choice.layout}: {other.because}" for other in found)
    names = {"tp": "tensor", "cp": "context", "pp": "pipeline_blocks"}
    # Where the family goes all the way in one form, that another form of it is refused says nothing.
    whole = any(getattr(other.estimate.choice.layout, turn.family, 0) == plan.num_devices for other in found)
    refused = [r for r in plan.refusals if r.rule == names.get(turn.family) and not whole]
    yield from (f"{refusal.layout} is refused: {refusal.because}" for refusal in refused[:1])
    if not found and not refused:
        yield "not weighed: the layout or the number of devices leaves no such choice"


def _blocks(profile: ModelProfile, leading: Estimate) -> list[str]:
    """What each block holds: parameters of one unit, gathered bytes, activations of one sample, and who keeps them."""
    setting = setting_of(leading.choice)
    lines = [
        f"The blocks, whole, for one sample ({setting.precision}); a forward has {setting.micro_batch} of them",
        f"  {'unit':<22}{'parameters':>12}{'gathered':>11}{'kept':>11}{'recompute=full':>16}   kept most by",
    ]
    for block in _largest_first(profile):
        name = block.name if block.count == 1 else f"{block.count} x {block.name}"
        sizes = (block.parameters * setting.mechanisms.gather_bytes, block.saved_bytes, _kept_in_full(block))
        gathered, kept, full = (format_bytes(size) for size in sizes)
        row = f"  {name:<22}{format_count(block.parameters):>12}{gathered:>11}{kept:>11}{full:>16}"
        lines.append(f"{row}   {', '.join(_keepers(block))}"[:WIDTH])
    return [*lines, "  kept, gathered and parameters are of one of the units; tp, cp and ep divide them"]


def _largest_first(profile: ModelProfile) -> list[Block]:
    return sorted(profile.blocks, key=lambda one: -one.saved_bytes * one.count)


def _kept_in_full(block: Block) -> float:
    """Under recompute=full."""
    return block.input_bytes if block.repeated else block.saved_bytes


def _keepers(block: Block) -> list[str]:
    most = sorted(block.operations, key=lambda one: -one.saved_bytes)[:LISTED_OPERATIONS]
    return [one.name.rpartition(".")[2] or one.name for one in most if one.saved_bytes]


def _fill(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) or [head]
