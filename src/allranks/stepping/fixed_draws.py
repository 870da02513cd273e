"""Random numbers of torch that are the same for every sample: to compare a batch with its parts while a model draws.

Dropout leaves everything in, and every other draw gives one value for all of its elements. What such a model computes
for a sample alone then depends on that sample alone, however many others stand beside it. A permutation is a turn by
one: where it mixes the samples of a batch, the batch still differs from its parts.

What is chosen once each (a permutation, weights without replacement) has places, and a batch takes other ones than its
parts where it chooses for all samples from one table: negatives from a vocabulary, say. A table is as long for a part
as for the batch, unlike what mixes samples. So lengths are noted, and tables can be turned further, to see whether the
choice changes the loss.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

MOST_DRAWS = 10_000  # a loop that draws until a draw suits it would never end

_DROPOUTS = frozenset(
    f"{name}{place}"
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for place in ("", "_", "1d", "2d", "3d")
)
_ATTENTION = "scaled_dot_product_attention"
_PLACE_OF_DROPOUT = 4  # among the arguments of attention

Draw = Callable[[torch.Tensor, Sequence[Any], Mapping[str, Any]], Any]
_CHOICES = ("randperm", "multinomial")


@final
class FixedDraws(TorchFunctionMode):
    """Inside, what torch draws has one value. Python's and numpy's draws, and those inside of kernels, are as ever.

    Args:
        turned: lengths of what another choice than usual is made from.

    Attributes:
        lengths: of all that was chosen from without replacement.
    """

    def __init__(self, turned: Collection[int] = ()) -> None:
        super().__init__()
        self.lengths: set[int] = set()
        self._turned = frozenset(turned)
        self._left = MOST_DRAWS

    def __torch_function__(
        self, function: Callable[..., Any], kinds: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == _ATTENTION:
            if len(args) > _PLACE_OF_DROPOUT:
                args = (*args[:_PLACE_OF_DROPOUT], 0.0, *args[_PLACE_OF_DROPOUT + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        drawn = function(*args, **kwargs)
        draw = self._choose if name in _CHOICES else _DRAWS.get(name)
        if draw is None or not isinstance(drawn, torch.Tensor) or not self._left:
            return drawn
        self._left -= 1
        value = draw(drawn, args, kwargs)
        with torch.no_grad():
            return drawn.copy_(value) if isinstance(value, torch.Tensor) else drawn.fill_(value)

    def _choose(self, drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A permutation, or what `torch.multinomial` chooses: the heaviest, of a single row from the second on."""
        weights = args[0] if args else kwargs.get("input")
        if not isinstance(weights, torch.Tensor):
            return torch.arange(len(drawn), device=drawn.device).roll(1 + self._turn(len(drawn), len(drawn)))
        (replaced,) = _numbers(args[1:], kwargs, ("replacement",), (False,))
        if replaced:
            return weights.argmax(-1, keepdim=True).expand_as(drawn)
        found = weights.sort(dim=-1, descending=True, stable=True).indices
        if weights.numel() == weights.shape[-1]:  # several rows choose for themselves
            able = weights.numel() if weights.is_meta else int((weights > 0).sum())
            turned = found[..., :able].roll(-1 - self._turn(weights.numel(), able), -1)
            found = torch.cat([turned, found[..., able:]], -1)
        return found[..., : drawn.shape[-1]]

    def _turn(self, length: int, able: int) -> int:
        """By how much more than usual a choice from so many is turned: by half, after which it is another one."""
        self.lengths.add(length)
        return max(1, able // 2) if length in self._turned else 0


def _numbers(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], default: Sequence[Any]) -> list[Any]:
    """The arguments of these names, after the tensor that is filled."""
    given = dict(zip(names, args[1:], strict=False)) | dict(kwargs)
    return [given.get(name, usual) for name, usual in zip(names, default, strict=True)]


def _uniform(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    low, high = _numbers(args, kwargs, ("from", "to"), (0.0, 1.0))
    return (low + high) / 2


def _normal_in_place(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    mean, std = _numbers(args, kwargs, ("mean", "std"), (0.0, 1.0))
    return mean + std / 2


def _normal(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    mean, std = _numbers((None, *args), kwargs, ("mean", "std"), (0.0, 1.0))
    return mean + std / 2


def _bernoulli(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    chance = args[0] if args else kwargs["input"]
    return chance >= 1 / 2


def _bernoulli_in_place(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (chance,) = _numbers(args, kwargs, ("p",), (1 / 2,))
    return torch.as_tensor(chance) >= 1 / 2


def _integer(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The lowest: of two limits the first."""
    limits = [value for value in args if isinstance(value, int)]
    return kwargs.get("low", kwargs.get("from", limits[0] if len(limits) > 1 else 0))


def _shares(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The mean of what is drawn: no share is 0 or all."""
    return args[0] / args[0].sum(-1, keepdim=True)


def _halves(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return 0.5


def _ones(drawn: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return 1.0


_DRAWS: dict[str, Draw] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like"), _halves),
    **dict.fromkeys(
        ("exponential_", "log_normal_", "cauchy_", "geometric_", "poisson", "binomial", "_standard_gamma"), _ones
    ),
    **dict.fromkeys(("randint", "randint_like", "random_"), _integer),
    "_sample_dirichlet": _shares,
    "uniform_": _uniform,
    "normal_": _normal_in_place,
    "normal": _normal,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
}
