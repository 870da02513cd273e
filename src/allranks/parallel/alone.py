"""What the ranks do together inside of modules that a forward may leave out on some of them: refused.

A rank that passes such a module by would keep the others waiting, or join what another module does, and mix the two.
Ranks of one tp group see the same samples and the same whole activations, to the bit, and leave out the same: what tp
cuts may be optional, but not where activations are cut along the sequence.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from allranks.errors import LayoutError
from allranks.parallel.batchnorm import BatchNorms, uses_batch_statistics
from allranks.parallel.context import forbid_attention
from allranks.parallel.expert import is_experts
from allranks.parallel.mesh import Mesh


def check_alone(
    modules: Mapping[str, nn.Module], optional: Mapping[str, Sequence[str]], mesh: Mesh, norms: BatchNorms
) -> None:
    """Refuse modules that a forward may leave out, and inside of which ranks work together.

    Args:
        optional: as of `find_optional`.
        norms: the BatchNorms, as they are taken over.

    Raises:
        LayoutError: here, for synchronised statistics and cut experts; for attention over cut sequences when it is
            called.
    """
    for which, names in optional.items():
        for name in names:
            shown = f"{which}.{name}" if which else name
            for below, member in modules[which].get_submodule(name).named_modules(prefix=shown):
                if norms.synchronises and uses_batch_statistics(member):
                    together = f"all {mesh.layout.gradient_ranks} ranks take the statistics of {below} together"
                    raise LayoutError(_say_alone(shown, together, "say layout.batchnorm=local (or broadcast)"))
                if mesh.layout.ep > 1 and is_experts(member):
                    together = f"ep={mesh.layout.ep} ranks exchange the tokens of {below} together"
                    raise LayoutError(_say_alone(shown, together, "leave ep out"))
            if mesh.layout.cp > 1:
                together = f"cp={mesh.layout.cp} ranks attend to each other's positions in it together"
                forbid_attention(modules[which].get_submodule(name), _say_alone(shown, together, "leave cp out"))


def _say_alone(name: str, together: str, remedy: str) -> str:
    return (
        f"hints().optional: a forward may leave out {name}, and {together}: {remedy}, or take {name} out of "
        "hints().optional and have every forward enter it"
    )


def check_whole_positions(optional: Sequence[str], tp: int) -> None:
    """Refuse what a forward may leave out where each tp rank would decide by positions of its own. Raises LayoutError.

    Args:
        optional: patterns of `hints().optional`.
    """
    if optional:
        raise LayoutError(
            f"hints().optional: tp={tp} cuts activations along the sequence, and each rank would decide by its own "
            f"positions whether a forward leaves out {optional[0]}: give hints().tensor without the style sequence, or "
            "leave tp out"
        )
