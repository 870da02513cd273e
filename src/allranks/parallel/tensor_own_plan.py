"""The plan for tp that a model carries itself: `tensor_plan` on its class, or Hugging Face's `_tp_plan`.

A plan of Hugging Face is that of a family. It has rules for layers that this model lacks, words of its own for the same
styles, and says nothing of an embedding that is the last layer, too.
"""

import fnmatch
from collections.abc import Mapping

from torch import nn

from allranks.hints import TensorStyle

# Hugging Face's words for the same.
_FOREIGN = {
    "colwise_rep": "vocab",
    "colwise_gather_output": "vocab",
    "embedding_rowwise": "vocab",
    "rowwise_split_input": "rowwise",
    "sequence_parallel": "sequence",
    "replicated_with_grad_allreduce": "part",
}
_EXPERTS = "moe_tp_experts"  # a module of stacked experts, whose parameters have rules as if they were modules


def read_own_plan(module: nn.Module) -> tuple[dict[str, str], tuple[str, ...]]:
    """The rules that `module` carries (pattern -> style), and patterns of the experts that they leave whole.

    What is no style in Hugging Face's words is handed on as it is. Stacked experts compute with whole parameters on
    every rank: to their router and to what follows that is the same.
    """
    carried = getattr(module, "tensor_plan", None)
    if carried:
        return {pattern: _FOREIGN.get(style, style) for pattern, style in carried.items()}, ()
    rules: Mapping[str, str] = getattr(module, "_tp_plan", None) or {}
    modules = [name for name, _ in module.named_modules() if name]
    # Not named_parameters(), which leaves out the second name of a shared one.
    parameters = [f"{name}.{own}" for name, member in module.named_modules() for own in member._parameters]
    experts = tuple(pattern for pattern, word in rules.items() if word == _EXPERTS)
    kept = {
        pattern: _FOREIGN.get(word, word)
        for pattern, word in rules.items()
        if _matches(pattern, [*modules, *parameters])
        and not any(pattern == whole or pattern.startswith(f"{whole}.") for whole in experts)
    }
    return kept, tuple(pattern for pattern in experts if _matches(pattern, modules))


def tie_embeddings(
    named: Mapping[str, nn.Module], styles: Mapping[str, TensorStyle]
) -> tuple[dict[str, TensorStyle], str]:
    """Rules with those for embeddings that share the weight of a `vocab` layer, and what to say of the others.

    An embedding that computes in its own way (Gemma's, which multiplies) cannot be cut, and with it a layer that shares
    its weight; both stay whole.
    """
    found = dict(styles)
    heads = [name for name, style in styles.items() if style == "vocab" and isinstance(named[name], nn.Linear)]
    embeddings = {name: member for name, member in named.items() if isinstance(member, nn.Embedding)}
    whole: list[str] = []
    for name, member in embeddings.items():
        tied = [head for head in heads if named[head].weight is member.weight]
        if type(member) is nn.Embedding:
            found |= dict.fromkeys([name] if tied else [], "vocab")
        elif found.pop(name, None) or tied:
            whole += [name, *tied]
    for name in whole:
        found.pop(name, None)
    return found, f"{', '.join(whole)} stay whole: the embedding computes in its own way" if whole else ""


def _matches(pattern: str, names: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
