"""What chooses is seen whatever it is called, under a model's logical names, and gradients follow what is chosen."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.models.moe import MoETransformer
from allranks.verifying.choosing import Choosing
from allranks.verifying.routing import Place, Recorder

Seen = list[tuple[Place, torch.Tensor, torch.Tensor]]
Chooser = Callable[[torch.Tensor], torch.Tensor]

CHOOSERS: dict[str, Chooser] = {
    "topk": lambda scores: scores.topk(1, dim=-1).indices,
    "sort": lambda scores: scores.sort(descending=True).indices[..., :1],
    "stable sort": lambda scores: torch.sort(scores, stable=True, dim=-1, descending=True).indices[..., :1],
    "argsort": lambda scores: torch.argsort(scores, descending=True)[..., :1],
    "stable argsort": lambda scores: torch.argsort(scores, stable=True, descending=True)[..., :1],
    "max": lambda scores: scores.max(-1).indices.unsqueeze(-1),
    "kept max": lambda scores: scores.max(-1, keepdim=True).indices,
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "flat argmax": lambda scores: scores.argmax(-1).unsqueeze(-1),
}


class Router(nn.Module):
    def __init__(self, choose: Chooser) -> None:
        super().__init__()
        self.score = nn.Linear(3, 4)
        self.choose = choose

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.score(rows)
        return scores.gather(-1, self.choose(scores))


def watch(model: nn.Module, rows: torch.Tensor, instead: int | None = None) -> tuple[Seen, torch.Tensor]:
    seen: Seen = []

    def decide(place: Place, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        seen.append((place, rows, chosen))
        if instead is None:
            return None
        other = chosen.clone()
        other[:, 0] = instead
        return other

    with Choosing(decide).within({"": model}):
        output = model(rows)
        output.sum().backward()
    return seen, output


def touched(layer: nn.Linear) -> list[bool]:
    assert layer.weight.grad is not None
    return [bool(row.any()) for row in layer.weight.grad]


@pytest.mark.parametrize("name", CHOOSERS)
def test_it_is_seen_and_changed(name: str) -> None:
    router, rows = Router(CHOOSERS[name]), torch.randn(2, 5, 3)
    model = nn.Sequential(nn.Identity(), router)
    ((place, given, chosen),), _ = watch(model, rows)
    assert place.module == "1" and place.num_candidates == 4
    assert torch.equal(given, rows.view(10, 3)) and chosen.shape == (10, place.num_chosen)
    assert torch.equal(chosen[:, :1], router.score(rows).argmax(-1).view(10, 1))
    model.zero_grad()
    _, output = watch(model, rows, instead=2)
    assert torch.allclose(output, router.score(rows)[..., 2:3])
    assert touched(router.score) == [False, False, True, False], "the gradient goes where it was sent"


def test_values_and_their_gradients_follow() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(3, 4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.score(rows).topk(1).values
            return found

    model, rows = Weighted(), torch.randn(5, 3)
    _, output = watch(model, rows, instead=3)
    assert torch.allclose(output, model.score(rows)[:, 3:])
    assert touched(model.score) == [False, False, False, True]


def test_what_is_no_routing_is_left_alone() -> None:
    def several(scores: torch.Tensor) -> torch.Tensor:
        scores.flatten().topk(3)  # over all
        scores.max(0)  # over rows
        scores.max()
        torch.max(scores, scores)
        scores.argmax()
        scores.long().sort()  # of whole numbers
        scores.repeat(1, 1, 300).argmax(-1)  # among a vocabulary
        return scores.unsqueeze(-1).expand(-1, -1, -1, 2).argmax(-1)[..., :1] * 0  # another row than the rows

    seen, _ = watch(Router(several), torch.randn(2, 5, 3))
    assert [place.num_candidates for place, _, _ in seen] == []
    model = Router(CHOOSERS["topk"])
    with Choosing(lambda *given: pytest.fail("nothing is inside")).within({"": nn.Linear(1, 1)}):
        model(torch.randn(2, 3))


def test_names_are_those_without_wrappers_and_hooks_are_gone_afterwards() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(Router(CHOOSERS["topk"]))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.module[0](rows)
            return found

    model = Wrapper()
    assert [place.module for place, _, _ in watch(model, torch.randn(2, 3))[0]] == ["0"]
    assert [place.module for place, _, _ in watch(Router(CHOOSERS["topk"]), torch.randn(2, 3))[0]] == [""]
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks


def test_a_recomputation_chooses_again_at_the_same_place() -> None:
    router = Router(CHOOSERS["topk"])

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = router

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(self.inner, rows, use_reentrant=False)
            return found

    seen, _ = watch(Recomputed(), torch.randn(5, 3))
    assert [place.module for place, _, _ in seen] == ["inner", "inner"]


def test_our_own_mixture_of_experts_is_seen_in_every_layer() -> None:
    model = MoETransformer(13, 2, 16, 2, num_experts=4, top_k=2, ffn=8, max_seq=8)
    recorder = Recorder()
    with Choosing(recorder.decide).within({"": model}):
        model(torch.randint(0, 13, (3, 8))).sum().backward()
    places = [Place(f"layers.{layer}.feed_forward.router", 4, 4) for layer in (0, 1)]
    assert list(recorder.recorded()) == places
    assert all(recorder.recorded()[place].rows.shape == (24, 32) for place in places)
