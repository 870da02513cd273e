"""Plans that models carry themselves: words of others, layers that are not there, experts and tied embeddings."""

from typing import Any

import pytest
from torch import nn

from allranks.errors import LayoutError
from allranks.parallel.tensor_own_plan import read_own_plan, tie_embeddings
from allranks.parallel.tensor_plan import plan_tensor


class Scaled(nn.Embedding):
    """An embedding of its own kind."""


class Stacked(nn.Module):
    """Experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(nn.Linear(4, 8).weight.detach().clone())


class Family(nn.Module):
    """A model with a plan in Hugging Face's words."""

    def __init__(
        self, plan: dict[str, str], embedding: type[nn.Embedding] = nn.Embedding, *, tied: bool = True
    ) -> None:
        super().__init__()
        self._tp_plan = plan
        self.words = embedding(10, 4)
        self.packed, self.out, self.experts = nn.Linear(4, 8), nn.Linear(8, 4), Stacked()
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.words.weight


PHI = {"packed": "colwise_gather_output", "out": "rowwise_split_input", "head": "colwise_gather_output"}


def plan_of(module: nn.Module, **options: Any) -> Any:
    return plan_tensor({"": module}, {}, 2, **options)


def test_a_plan_of_ones_own_is_taken_as_it_is() -> None:
    module = Family({"packed": "colwise"})
    module.tensor_plan = {"out": "rowwise"}  # type: ignore[assignment]
    assert read_own_plan(module) == ({"out": "rowwise"}, ())
    assert read_own_plan(nn.Linear(2, 2)) == ({}, ())


def test_words_are_translated_and_layers_that_are_missing_left_out() -> None:
    rules, whole = read_own_plan(Family({**PHI, "dense.up": "colwise", "dense.kv": "mla_kv_a_proj"}))
    assert rules == {"packed": "vocab", "out": "rowwise", "head": "vocab"}
    assert whole == ()


def test_experts_stay_whole_and_that_is_said() -> None:
    experts = {"experts.up": "packed_colwise", "experts": "moe_tp_experts", "others": "moe_tp_experts"}
    assert read_own_plan(Family({**PHI, **experts}))[1] == ("experts",)
    plan = plan_of(Family({**PHI, **experts}))
    assert plan.because == "the model carries its own plan; experts stay whole on every rank (dp_shard spreads them)"
    assert set(plan.styles) == {"packed", "out", "head", "words"}


@pytest.mark.parametrize("rule", [{"experts.up": "packed_colwise"}, {"packed": "mla_kv_a_proj"}])
def test_what_is_not_known_is_refused_by_name(rule: dict[str, str]) -> None:
    (pattern, word), *_ = rule.items()
    with pytest.raises(LayoutError, match=rf"cuts {pattern} in the way '{word}', which allranks does not know: give"):
        plan_of(Family({**PHI, **rule}))


def test_an_embedding_follows_the_layer_that_shares_its_weight() -> None:
    assert plan_of(Family(PHI)).styles["words"] == "vocab"
    assert "words" not in plan_of(Family(PHI, tied=False)).styles


@pytest.mark.parametrize("rules", [PHI, {**PHI, "words": "embedding_rowwise"}])
def test_one_that_computes_in_its_own_way_stays_whole(rules: dict[str, str]) -> None:
    plan = plan_of(Family(rules, Scaled))
    assert set(plan.styles) == {"packed", "out"}
    assert plan.because.endswith("; words, head stay whole: the embedding computes in its own way")
    assert set(plan_of(Family(rules, Scaled, tied=False)).styles) == {"packed", "out", "head"}


def test_nothing_is_said_where_nothing_is_tied() -> None:
    module = Family(PHI, tied=False)
    assert tie_embeddings(dict(module.named_modules()), {"head": "vocab"}) == ({"head": "vocab"}, "")


def test_loss_parallel_is_for_the_last_layer() -> None:
    with pytest.raises(LayoutError, match="loss_parallel leaves what vocab layers give cut until the loss, and packed"):
        plan_of(Family(PHI), loss_parallel=True)
