"""How tensor and expert parallelism would cut each kernel: by the engine's plan, followed along the data.

The plan names layers. What runs between them goes by what it reads: after a layer whose outputs are cut, activations
are cut by features, and attention by its heads; after one whose inputs are cut they are cut along the sequence, where
the plan does that at all (arXiv 2205.05198), or whole.
"""

from collections.abc import Sequence
from typing import Final

from allranks.model_profile import Cut
from allranks.profiling.recording import Call
from allranks.profiling.structure import Structure, is_inside

_FEATURES: Final = ("column", "heads")


def find_cuts(calls: Sequence[Call], structure: Structure) -> list[Cut]:
    """The cut of every call, forward and backward (where it is always "")."""
    cuts: list[Cut] = []
    states: list[Cut] = []
    whole: Cut = "sequence" if structure.sequence else ""
    for call in calls:
        inherited = _inherited(call, states)
        cut, state = _cut(call, structure, inherited, whole)
        cuts.append("" if call.backward else cut)
        states.append(state)
    return cuts


def _cut(call: Call, structure: Structure, inherited: Cut, whole: Cut) -> tuple[Cut, Cut]:
    """(how it is cut, how its output is)."""
    place = owner(call)
    if any(is_inside(place, name) for name in structure.experts):
        return "expert", ""
    ruled = next((name for name in structure.styles if is_inside(place, name)), None)
    style = None if ruled is None else structure.styles[ruled]
    if style in ("colwise", "part"):
        return ("column", "column") if call.parameters or style == "part" else (inherited, inherited)
    if style == "rowwise":
        return ("row", whole) if call.parameters else (inherited, whole)
    if style == "vocab":
        if call.kind == "embedding":
            return "vocab", whole
        return "vocab" if call.parameters else "", "column" if structure.loss_parallel else ""
    if style == "heads":
        return _cut_attention(call, place, ruled or "", inherited, whole)
    if style == "sequence":
        return "sequence", "sequence"
    if style == "replicate" or not structure.styles:
        return "", whole if style == "replicate" and inherited == "sequence" else ""
    if call.kind == "attention" and inherited in _FEATURES:
        return "heads", "column"
    return inherited, inherited


def _cut_attention(call: Call, place: str, ruled: str, inherited: Cut, whole: Cut) -> tuple[Cut, Cut]:
    """torch's own attention, which computes its projections by itself."""
    if call.parameters:
        return ("row", whole) if place != ruled else ("column", "column")
    if call.kind == "attention" or (call.kind == "matmul" and inherited in _FEATURES):
        return "heads", "column"
    return inherited, inherited


def _inherited(call: Call, states: Sequence[Cut]) -> Cut:
    """What its inputs are cut by: one that is cut by features makes the result so."""
    found = {states[read.producer] for read in call.inputs if read.producer >= 0}
    return next((cut for cut in ("column", "heads", "sequence") if cut in found), "")


def owner(call: Call) -> str:
    """The module that a call belongs to: that of its parameters, where they lie deeper than what was running."""
    running = call.modules[-1] if call.modules else ""
    owners = {name.rpartition(".")[0] for name in call.parameters}
    deeper = [name for name in owners if is_inside(name, running)]
    return deeper[0] if len(deeper) == 1 else running
