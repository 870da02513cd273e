"""Which modules tensor parallelism cuts, and how: from hints, from the model's own plan, or found by structure.

    colwise     nn.Linear: each rank has some of the outputs; what follows works on them alone
    rowwise     nn.Linear: each rank has some of the inputs; the ranks' sums are added up
    heads       nn.MultiheadAttention: each rank has some of the heads; the ranks' sums are added up
    vocab       nn.Embedding or nn.Linear: each rank has some of the rows; the output is whole
    sequence    any module: runs on some of the positions (norms and dropout between the cut layers)
    part        any module: runs on what a colwise layer has left (a norm over each head's channels)
    replicate   any module: runs on whole tensors, on every rank

Where some module is `sequence`, the activations between the cut layers are cut along the sequence (sequence
parallelism, arXiv 2205.05198). A model's own plan is a mapping of the same form on its class, `tensor_plan`, or that of
a Hugging Face model (`_tp_plan`).
"""

import difflib
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from torch import nn

from allranks.errors import LayoutError
from allranks.even_cut import divisors
from allranks.hints import TensorStyle
from allranks.losses import ChunkedHead
from allranks.parallel.anew import made_anew, made_before_forward
from allranks.parallel.blocks import CONTAINERS
from allranks.parallel.tensor_attention import counts_heads, has_feed_forward, why_not_heads
from allranks.parallel.tensor_own_plan import read_own_plan, tie_embeddings

STYLES: tuple[TensorStyle, ...] = get_args(TensorStyle)

CUT = ("colwise", "rowwise", "heads", "vocab")
_SHOWN = 8


@dataclass(frozen=True)
class TensorPlan:
    """How each module is cut.

    Attributes:
        styles: logical name of a module -> its style.
        because: where they come from.
        uneven: names whose parts may differ in size, since nothing between them minds.
        loss_parallel: whether the logits of a last layer stay cut until the loss.
    """

    styles: Mapping[str, TensorStyle]
    because: str
    uneven: frozenset[str] = frozenset()
    loss_parallel: bool = False

    @property
    def sequence(self) -> bool:
        """Whether activations are cut along the sequence between the cut layers."""
        return "sequence" in self.styles.values()


def plan_tensor(
    modules: Mapping[str, nn.Module], hints: Mapping[str, TensorStyle], degree: int, *, loss_parallel: bool = False
) -> TensorPlan:
    """The plan for `modules` (by name, "" for a single one), cut over `degree` ranks.

    Raises:
        LayoutError: a hint matches nothing, or two match one module; a size does not divide; nothing can be cut.
    """
    named = {
        ".".join(filter(None, (which, name))): member
        for which, module in modules.items()
        for name, member in module.named_modules()
    }
    plan = replace(_resolve(named, hints), loss_parallel=loss_parallel)
    _check_apart(plan)
    for name, style in plan.styles.items():
        _check_kind(name, named[name], style)
    _check_sizes([*_heads(named, plan), *_widths(named, plan)], degree)
    if plan.sequence:
        _check_covered(named, plan)
    heads = [name for name, style in plan.styles.items() if style == "vocab" and isinstance(named[name], nn.Linear)]
    if loss_parallel:
        _check_heads_last(plan, heads, list(named))
    if loss_parallel and not heads:
        cut = ", ".join(plan.styles)
        raise LayoutError(
            f"hints().loss_parallel leaves logits cut, but tp cuts no last layer: {cut} are no nn.Linear with the "
            'style vocab; say so in hints().tensor ({"head": "vocab"}), or leave loss_parallel out'
        )
    return plan


def _resolve(named: Mapping[str, nn.Module], hints: Mapping[str, TensorStyle]) -> TensorPlan:
    if hints:
        return TensorPlan(_match(named, hints, "hints().tensor"), "hints().tensor says so")
    own = {name: rules for name, module in named.items() if any(rules := read_own_plan(module))}
    if own:
        return _follow(named, own)
    pairs = {name: style for prefix, module in named.items() for name, style in _find_pairs(prefix, module)}
    if not pairs:
        raise LayoutError(
            "tp finds nothing to cut: no two linear layers follow each other in an MLP, nn.MultiheadAttention is not "
            "there to be cut between its heads, and the model carries no plan; "
            'name them: Hints(tensor={"layers.*.up": "colwise", "layers.*.down": "rowwise"})'
        )
    found = {"heads": "attention is cut between its heads"} if "heads" in pairs.values() else {}
    if "colwise" in pairs.values():
        found["pairs"] = "these linear layers follow each other in pairs"
    attention = {name: module for name, module in named.items() if isinstance(module, nn.MultiheadAttention)}
    whole = next((f"; {name} stays whole: it {why}" for name, m in attention.items() if (why := why_not_heads(m))), "")
    return TensorPlan(pairs, ", and ".join(found.values()) + whole, frozenset(pairs))


def _follow(named: Mapping[str, nn.Module], own: Mapping[str, tuple[dict[str, str], tuple[str, ...]]]) -> TensorPlan:
    """The plans that modules carry themselves (name -> rules, experts that stay whole), the outermost of each."""
    styles: dict[str, TensorStyle] = {}
    said = ["the model carries its own plan"]
    for prefix, (rules, experts) in own.items():
        if any(other != prefix and (not other or prefix.startswith(f"{other}.")) for other in own):
            continue
        at = f"{prefix}." if prefix else ""
        for pattern, style in rules.items():
            if style not in STYLES:
                raise LayoutError(
                    f"the model's own plan cuts {at}{pattern} in the way {style!r}, which allranks does not know: give "
                    f"Hints(tensor=...) with {', '.join(STYLES)}"
                )
        known = {at + pattern: cast("TensorStyle", style) for pattern, style in rules.items()}
        styles |= _match(named, known, "the model's plan")
        said += [f"{at}{pattern} stay whole on every rank (dp_shard spreads them)" for pattern in experts]
    tied, whole = tie_embeddings(named, styles)
    return TensorPlan(tied, "; ".join(filter(None, [*said, whole])))


def _match(named: Mapping[str, nn.Module], rules: Mapping[str, TensorStyle], source: str) -> dict[str, TensorStyle]:
    """The outermost modules that each rule matches; a rule for cut layers means the layers inside too."""
    styles: dict[str, TensorStyle] = {}
    by_pattern: dict[str, str] = {}
    for pattern, style in rules.items():
        if style not in STYLES:
            raise LayoutError(f"{source}: {pattern!r} is {style!r}; a style is one of {', '.join(STYLES)}")
        matched = [name for name in named if name and fnmatch.fnmatchcase(name, pattern)]
        matched = [name for name in matched if not any(name.startswith(f"{other}.") for other in matched)]
        if not matched:
            near = difflib.get_close_matches(pattern, [name for name in named if name], n=_SHOWN, cutoff=0.3)
            shown = ", ".join(near or list(named)[1 : _SHOWN + 1])
            raise LayoutError(f"{source}: {pattern!r} matches no module; the nearest are {shown}")
        for name in matched:
            if name in by_pattern:
                raise LayoutError(f"{source}: both {by_pattern[name]!r} and {pattern!r} match {name}; leave one")
            by_pattern[name], styles[name] = pattern, style
    return styles


def _find_pairs(prefix: str, module: nn.Module) -> Iterator[tuple[str, TensorStyle]]:
    """Two linear layers with only element-wise modules between them: the outputs of one are the inputs of the other.

    And torch's attention, and the pair in a layer of torch's encoder or decoder.
    """
    if not why_not_heads(module):
        yield prefix, "heads"
        return
    if has_feed_forward(module):
        yield from ((f"{prefix}.linear1".lstrip("."), "colwise"), (f"{prefix}.linear2".lstrip("."), "rowwise"))
        return
    if isinstance(module, CONTAINERS) and not isinstance(module, nn.Sequential):
        return
    first: str | None = None
    width = 0
    bearing = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
    if not isinstance(module, nn.Sequential) and (
        len(bearing) != 2 or any(True for _ in module.parameters(recurse=False))
    ):
        return
    for name, child in module.named_children():
        logical = f"{prefix}.{name}" if prefix else name
        if type(child) is nn.Linear and not made_anew(child):
            if first is not None and child.in_features == width:
                yield first, "colwise"
                yield logical, "rowwise"
                first = None
            else:
                first, width = logical, child.out_features
        elif not _is_elementwise(child):
            first = None


def _is_elementwise(module: nn.Module) -> bool:
    """Torch's activations stand in one file; a softmax looks at its neighbours, and so does a gated unit."""
    if isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmin | nn.Softmax2d | nn.GLU | nn.MultiheadAttention):
        return False
    if isinstance(module, nn.PReLU):
        return False  # its slopes would have to be cut too
    return isinstance(module, nn.Dropout | nn.Identity) or type(module).__module__ == "torch.nn.modules.activation"


def _check_apart(plan: TensorPlan) -> None:
    """A rule for a whole module says everything about what is inside."""
    for name in plan.styles:
        outer = next((other for other in plan.styles if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise LayoutError(f"{name} lies in {outer}, and both have a rule for tp: leave one")


def _check_kind(name: str, module: nn.Module, style: TensorStyle) -> None:
    if style == "heads" and (reason := why_not_heads(module)):
        raise LayoutError(f"heads cuts nn.MultiheadAttention, and {name or 'the model'} {reason}: replicate it")
    fit = {"colwise": (nn.Linear,), "rowwise": (nn.Linear,), "vocab": (nn.Linear, nn.Embedding)}.get(style)
    chunked = style == "vocab" and isinstance(module, ChunkedHead)
    if style in CUT and (reason := made_anew(module)):
        raise LayoutError(
            f"{style} cuts parameters, and {name} {reason}: leave its rule out (it stays whole), or build it without"
        )
    inside = (below for below in module.modules() if style in ("sequence", "part"))
    if reason := next(filter(None, map(made_before_forward, inside)), ""):
        raise LayoutError(
            f"{name} is {style}, where gradients of its parameters are summed over tp, and a layer of it {reason}: "
            "build it without"
        )
    if fit is not None and type(module) not in fit and not chunked:
        kinds = " or ".join(f"nn.{kind.__name__}" for kind in fit)
        advice = "name the layers themselves"
        if isinstance(module, nn.MultiheadAttention):
            advice = 'attention\'s style is "heads"'
        elif isinstance(module, nn.EmbeddingBag):
            advice = "it stays whole over tp, so leave its rule out; dp_shard (fsdp) cuts it by row"
        elif isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            advice = f'it lies in {name.rpartition(".")[0]}, whose style is "heads"'
        elif isinstance(module, fit):
            advice = f"it computes in its own way; build an nn.{fit[0].__name__} there"
        raise LayoutError(f"{style} cuts {kinds}, and {name} is {type(module).__name__}: {advice}")
    if (
        style == "vocab"
        and isinstance(module, nn.Embedding)
        and (module.max_norm is not None or module.scale_grad_by_freq)
    ):
        raise LayoutError(f"{name} has max_norm or scale_grad_by_freq, which look at rows of other ranks: replicate it")


def _check_sizes(sizes: Sequence[tuple[str, int]], degree: int) -> None:
    """Every size (whose and what it is, the number) is divided by `degree`, or the degrees that divide all are told."""
    for what, size in sizes:
        if size % degree:
            fits = ", ".join(map(str, divisors(math.gcd(*(number for _, number in sizes)))))
            raise LayoutError(f"{what}, which tp({degree}) does not divide; tp can be {fits}")


def _heads(named: Mapping[str, nn.Module], plan: TensorPlan) -> Iterator[tuple[str, int]]:
    """Attention is cut between heads: whoever owns a layer that is cut by columns may say how many there are."""
    parents = {name.rpartition(".")[0] for name, style in plan.styles.items() if style == "colwise"}
    parents |= {name for name, style in plan.styles.items() if style == "heads"}
    for parent in sorted(parents):
        for holder in (named[parent], getattr(named[parent], "config", None)):
            for attribute, value in sorted(vars(holder).items()) if holder is not None else ():
                if counts_heads(attribute, value):
                    yield f"{parent or 'the model'} has {attribute}={value}", value


def _widths(named: Mapping[str, nn.Module], plan: TensorPlan) -> Iterator[tuple[str, int]]:
    """Of linear layers that are cut, where something minds parts of unequal size.

    Rows of a vocabulary are looked up one by one, so their parts may differ in size; heads are counted by themselves.
    """
    for name, style in plan.styles.items():
        module = named[name]
        if style in ("colwise", "rowwise") and name not in plan.uneven:
            assert isinstance(module, nn.Linear)
            size, what = (module.out_features, "outputs") if style == "colwise" else (module.in_features, "inputs")
            yield f"{name} has {size} {what}", size


def _check_covered(named: Mapping[str, nn.Module], plan: TensorPlan) -> None:
    """On cut positions each rank's gradients are partial sums: whoever has parameters must be known."""
    for name, module in named.items():
        own = any(True for _ in module.parameters(recurse=False))
        if own and not any(name == ruled or name.startswith(f"{ruled}.") for ruled in plan.styles):
            raise LayoutError(
                f"{name or 'the model'} has parameters and no rule, though activations are cut along the sequence: say "
                "in hints().tensor sequence (it sees some of the positions) or replicate (it has to see all)"
            )


def _check_heads_last(plan: TensorPlan, heads: Sequence[str], order: Sequence[str]) -> None:
    """Before a layer that is cut by rows, of the same module, a `vocab` layer is none that the loss sees."""
    rowwise = [name for name, style in plan.styles.items() if style == "rowwise"]
    for head in heads:
        beside = [name for name in rowwise if name.rpartition(".")[0] == head.rpartition(".")[0]]
        behind = next((name for name in beside if order.index(name) > order.index(head)), None)
        if behind is not None:
            raise LayoutError(
                f"hints().loss_parallel leaves what vocab layers give cut until the loss, and {head} is followed by "
                f"{behind}: leave loss_parallel out"
            )
