"""What a program's calls of torch tell while it runs: dropouts, noise, clipping, loaders."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final
from unittest.mock import patch

import torch

from allranks.verifying.early_names import renaming
from allranks.verifying.loader_watch import LoaderWatch, torch_digest
from allranks.verifying.permutation_watch import PermutationWatch
from allranks.verifying.recording import Draw

NOISE = ("randn", "rand", "randn_like", "rand_like")
NO_NOISE: Final = 1 << 30
DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def in_compiler() -> bool:
    """Whether torch.compile is at work: what runs now is looked at once, and computes nothing.

    It looks into some of what is put in torch's place here (`is_compiling`), and calls some as it is.
    """
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


@final
@dataclass
class Observer:
    """What a program's calls of torch tell while it runs.

    Attributes:
        drops: whether dropouts drop; if not, they are recorded, draw their numbers, and let everything pass.
        draws: the dropouts so far, and what was drawn with a row for each sample.
        rows: gives digests of the samples in work; noise with a row for each of them (torch.randn and the like) is then
            a function of the sample, so that it does not depend on who draws it.
        own_noise: whether that holds of generators of the program's own, too.
        least_dims: the fewest dims that noise of the generator that torch's operations share has to have for it. 1: one
            number for each sample, too, though as many may be something else by chance; `NO_NOISE`: it is left alone.
        on_clip: called with (parameters, norm) before torch's clipping scales gradients.
        loaders: what torch's loaders and samplers do.
        permutations: those that are drawn while data is made.
        salt: what noise of the shared generator is made of besides; another one gives other noise.
        unclaimed: shapes of what that generator drew in steps while samples were in work, with no row for each.
        compiled: whether some dropouts are compiled: these let everything pass, and are not noted.
        drawing: whether it draws itself at this moment, in place of the program and without any effect on it.
    """

    drops: bool = False
    draws: list[Draw] = field(default_factory=list)
    rows: Callable[[], Sequence[int]] = lambda: ()
    on_clip: Callable[[Sequence[torch.Tensor], torch.Tensor], None] = lambda parameters, norm: None
    loaders: LoaderWatch = field(default_factory=LoaderWatch)
    permutations: PermutationWatch = field(default_factory=PermutationWatch)
    own_noise: bool = False
    least_dims: int = 1
    salt: int = 0
    unclaimed: set[tuple[int, ...]] = field(default_factory=set)
    compiled: bool = False
    drawing: bool = False
    _noting: bool = False
    _calls: "Counter[tuple[int, ...]]" = field(default_factory=Counter)
    _made: dict[tuple[bool, int], list[int]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, torch's dropouts and clipping tell."""
        functional: Any = torch.nn.functional
        clip_grad: Any = torch.nn.utils.clip_grad
        clip, attention = clip_grad._clip_grads_with_norm_, functional.scaled_dot_product_attention

        def clipping(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self.on_clip(held, total_norm)
            clip(held, max_norm, total_norm, foreach)

        def attending(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            rest = list(args)
            probability = rest[3] if len(rest) > 3 else options.get("dropout_p", 0.0)
            if probability and not self.drops:
                if not self._is_traced():
                    self._draw(query, probability)
                if len(rest) > 3:
                    rest[3] = 0.0
                else:
                    options["dropout_p"] = 0.0
            elif probability and not self._is_traced():
                self._note(query.shape, probability)
            found: torch.Tensor = attention(query, *rest, **options)
            return found

        replaced = {attention: attending}
        replaced |= {getattr(functional, name): self._dropping(getattr(functional, name)) for name in DROPOUTS}
        replaced |= {getattr(torch, name): self._by_sample(getattr(torch, name)) for name in NOISE}
        with ExitStack() as stack:
            stack.enter_context(self.loaders.watching())
            stack.enter_context(self.permutations.watching())
            stack.enter_context(patch.object(clip_grad, "_clip_grads_with_norm_", clipping))
            stack.enter_context(renaming(replaced))
            for owner, names in ((functional, ("scaled_dot_product_attention", *DROPOUTS)), (torch, NOISE)):
                for name in names:
                    stack.enter_context(patch.object(owner, name, replaced[getattr(owner, name)]))
            yield

    def feed(self, rows: Sequence[int] | Callable[[], Sequence[int]], draws: list[Draw] | None = None) -> None:
        """Samples with these digests are in work from now on, those of a step where `draws` notes its dropouts."""
        self.begin_forward(rows)
        self._made.clear()
        self.draws, self._noting = [] if draws is None else draws, draws is not None
        if draws is not None:
            self.loaders.note_step()

    def begin_forward(self, rows: Sequence[int] | Callable[[], Sequence[int]] | None = None) -> None:
        """A forward begins: noise is counted from the first on. `rows`: its samples, where they are others."""
        self._calls.clear()
        if rows is not None:
            self.rows = rows if callable(rows) else partial(list, rows)

    def handing(self, batches: list[Any], rows: Sequence[Sequence[int]]) -> list[Any]:
        """The micro-batches of a step; which of them is in work, with its `rows`, is told by who takes them one by one.

        After the last, and before the first, all samples are.
        """
        return _Handed(self, batches, rows) if len(batches) > 1 else batches

    def _by_sample(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        plain: Any = {"randn_like": torch.randn, "rand_like": torch.rand}.get(original.__name__, original)

        def drawn(*args: Any, **options: Any) -> torch.Tensor:
            if in_compiler():
                return original(*args, **options)
            like = args[0] if args and isinstance(args[0], torch.Tensor) else None
            sizes = like.shape if like is not None else args[0] if args and not isinstance(args[0], int) else args
            shape = tuple(options.get("size", sizes))
            own = options.get("generator")
            wanted = self.own_noise and len(shape) > 1 if own is not None else len(shape) >= self.least_dims
            keys = self._keys(shape, own) if wanted else None
            if keys is None:
                return original(*args, **options)
            self.drawing = True
            self._note(shape, own=own, shared=own is None)
            original(*args, **options)  # what is drawn next is what it would have been
            if like is not None:
                options = {"dtype": like.dtype, "device": like.device} | options
            options = {k: value for k, value in options.items() if k not in ("size", "memory_format", "generator")}
            seeded = (torch.Generator().manual_seed(key) for key in keys)
            made = torch.stack([plain(shape[1:], generator=generator, **options) for generator in seeded])
            self.drawing = False
            return made

        return drawn

    def _keys(self, shape: tuple[int, ...], own: torch.Generator | None) -> list[int] | None:
        """A seed for the noise of each sample in work; None where there is no row for each.

        What a backward computes again begins from the state that its forward began from, and is that forward's noise:
        another micro-batch may be in work now.
        """
        began = own is None, torch_digest(own)
        again = self._made.get(began, []) if _in_backward() else []
        if again and len(again) == shape[0]:
            return again
        rows = self.rows()
        if not rows or shape[:1] != (len(rows),):
            if rows and own is None and self._noting:
                self.unclaimed.add(shape)
            return None
        fed = tuple(rows)
        self._calls[fed] += 1  # of these samples, whatever micro-batches come in between
        others = self._calls[fed] * 0x9E3779B97F4A7C15 + (self.salt if own is None else 0) * 0xBF58476D1CE4E5B9
        self._made[began] = [(row + others) % (1 << 63) for row in rows]
        return self._made[began]

    def _dropping(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if training and p > 0.0 and not self.drops:
                if not self._is_traced():
                    self._draw(input, p)
                # A mask that lets everything pass: it is kept for the backward as a real one is, or made again there.
                return input * torch.ones_like(input)
            if training and p > 0.0 and not self._is_traced():
                self._note(input.shape, p)
            return original(input, p, training, inplace)

        return dropout

    def _is_traced(self) -> bool:
        if in_compiler():
            self.compiled = True
            return True
        return False

    def _draw(self, input: torch.Tensor, probability: float) -> None:
        self._note(input.shape, probability)
        self.drawing = True
        torch.rand(input.numel())
        self.drawing = False

    def _note(
        self,
        shape: Sequence[int],
        probability: float = 0.0,
        own: torch.Generator | None = None,
        shared: bool = False,
    ) -> None:
        state, p = torch_digest(own), float(probability)
        self.draws.append(Draw(state, tuple(shape), _in_backward(), own is not None, p, shared))


@final
class _Handed(list[Any]):
    """Micro-batches that tell when they are taken: the last taken is in work.

    But where one is taken and nothing has run on the one before, as by a loop that looks ahead, nobody knows which is:
    from then on all are, until a look through them (to count, say) is over and they are taken anew.
    """

    def __init__(self, observer: Observer, batches: list[Any], rows: Sequence[Sequence[int]]) -> None:
        super().__init__(batches)
        self._observer, self._rows, self._all = observer, rows, observer.rows
        self._ran = 0, 0
        self._begin()

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        for place in range(len(self)):
            yield self[place]
        self._begin()

    def __getitem__(self, place: Any) -> Any:
        taken = super().__getitem__(place)
        if not isinstance(place, slice):
            self._take(range(len(self))[place])
        return taken

    def _begin(self) -> None:
        self._observer.rows = self._all
        self._last: int | None = None
        self._ahead, self._seen = False, set[int]()

    def _take(self, place: int) -> None:
        if place != self._last:
            # Whatever is computed with gradients has a node in autograd's graph.
            now = len(self._observer.draws), torch._C._autograd._get_sequence_nr()
            if self._last is not None and self._rows[self._last] and now == self._ran:
                self._ahead = place not in self._seen
                self._seen = self._seen if self._ahead else set()
            self._seen.add(place)
            self._last, self._ran = place, now
        self._observer.rows = self._all if self._ahead else partial(list, self._rows[place])


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
