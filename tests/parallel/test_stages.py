"""What a rank of a pipeline shares with the others."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.errors import LayoutError, TaskError
from allranks.layout import Layout
from allranks.parallel import stage_schedule
from allranks.parallel.initial import Source
from allranks.parallel.mesh import Mesh
from allranks.parallel.stages import count_for_all, cut_stages
from allranks.stepping.passes import Forward
from tests.distributed.pool import Pools
from tests.distributed.tasks import Tiny
from tests.parallel.spreads import spread


def stack() -> nn.Module:
    """The first and the last of six layers are one; the model has a parameter of its own."""
    layers = [nn.Linear(4, 4) for _ in range(6)]
    layers[5].weight = layers[0].weight
    model = nn.Sequential(*layers)
    model.register_parameter("own", nn.Parameter(torch.ones(2)))
    return model


def test_no_pipeline_has_no_stages() -> None:
    decisions: list[Any] = []
    assert cut_stages({"": stack()}, Mesh(Layout(), 0, None), torch.device("cpu"), (), (), decisions) is None
    assert decisions == []


def test_several_modules_are_refused() -> None:
    several = {"one": stack(), "two": stack()}
    with pytest.raises(LayoutError, match=r"pp=2 cuts one module, and model\(\) returned 2"):
        cut_stages(several, Mesh(Layout(pp=2), 0, None), torch.device("cpu"), (), (), [])


def share(pp: int, replicas: int) -> Any:
    """In a worker: what is held, and gradients after the sum over the stages that hold it."""
    found = spread(stack, Layout(pp=pp, dp_replicate=replicas), "float32")
    assert found.stages is not None
    place = found.mesh.coordinate("pp")
    for name, parameter in found.trainable().items():
        if name != "own" or place == 1:
            parameter.grad = torch.full_like(parameter, 10.0**place)
    found.stages.reduce_shared()
    gradients = {name: float(p.grad.flatten()[0]) for name, p in found.trainable().items() if p.grad is not None}
    norm = found.clip(list(found.trainable().values()), None, None)
    elsewhere = [n for n, p in found.trainable().items() if id(p) in found.stages.told_elsewhere]
    holders = {name: entry.holders for name, entry in found.map.items()}
    return place, gradients, elsewhere, holders, float(norm), found.trainable_names, found.decisions[0].what


def cut_backwards(schedule: str) -> list[str]:
    """In a worker, on a torch that cuts backwards wrongly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_schedule, "KNOWS_GRADIENTS", False)
        found = spread(stack, Layout(pp=2, schedule=schedule), "float32")
    return [str(decision) for decision in found.decisions if decision.what.startswith("warning")]


@pytest.mark.distributed
def test_a_schedule_that_gains_nothing_on_an_old_torch_says_so(pool: Pools) -> None:
    for told in pool(2).run(cut_backwards, "zbv"):
        assert len(told) == 1
        assert told[0].startswith(
            "warning: schedule=zbv runs both halves of a backward at once, and saves no waits, because "
        )
        assert "counts gradients twice where two ways lead to a parameter" in told[0]
    assert pool(2).run(cut_backwards, "interleaved") == [[], []]


@pytest.mark.distributed
@pytest.mark.parametrize(("pp", "replicas"), [(3, 1), (2, 2)])
def test_what_several_stages_hold_has_the_sum_of_their_gradients(pool: Pools, pp: int, replicas: int) -> None:
    last = pp - 1
    both = 1.0 + 10.0**last
    everyone = 10.0
    ranks = pool(pp * replicas).run(share, pp, replicas)
    for rank, (place, gradients, elsewhere, holders, _, _, _) in enumerate(ranks):
        assert gradients["own"] == everyone
        assert ("0.weight" in gradients) == (place in (0, last))
        if place in (0, last):
            assert gradients["0.weight"] == both
            assert holders["0.weight"] == tuple(sorted(r for r, other in enumerate(ranks) if other[0] in (0, last)))
        assert elsewhere == {0: [], last: ["own", "0.weight"]}.get(place, ["own"])
        assert holders["own"] == tuple(range(len(ranks))) and rank in holders["own"]


@pytest.mark.distributed
def test_the_norm_counts_everything_once(pool: Pools) -> None:
    ranks = pool(3).run(share, 3, 1)
    # 16 elements of the tied one with 101; own: 2 of 10; biases 0 and 5; two layers of 20 elements in each stage.
    squares = 16 * 101**2 + 2 * 10**2 + 4 * (1 + 100**2)
    squares += 20 * (1 + 10**2 + 10**2 + 100**2)
    assert {round(norm, 3) for *_, norm, _, _ in ranks} == {round(squares**0.5, 3)}
    names = {names for *_, names, _ in ranks}
    assert len(names) == 1 and len(names.pop()) == 12
    assert ranks[0][-1] == "3 stages over pp=3 begin at the model's start, 2, 4"


def count_by_rank(fails: bool) -> Any:
    """In a worker: what it is told where each would count otherwise, and where the first one cannot."""

    def count(module: nn.Module, names: Sequence[str]) -> list[float]:
        if fails and dist.get_rank() == 0:
            raise TaskError("it branches")
        return [float(dist.get_rank() + 1)] * (len(names) + 1)

    agreed = count_for_all(count, Source(dist.group.WORLD, 0, dist.get_rank() == 0), torch.device("cpu"))
    assert agreed is not None
    try:
        return agreed(nn.ReLU(), ["one", "two"])
    except TaskError as error:
        return str(error)


@pytest.mark.distributed
def test_one_rank_counts_for_all(pool: Pools) -> None:
    assert pool(2).run(count_by_rank, False) == [[1.0, 1.0, 1.0]] * 2
    assert pool(2).run(count_by_rank, True) == ["it branches", "on process 0"]


class Padded(nn.Module):
    """torch's encoder, as it is by default, over words of which 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(self.embedding(x), src_key_padding_mask=x == 0)
        return found


def evaluate_padded(words: torch.Tensor) -> Any:
    """In a worker: the output in evaluation mode without gradients, where the last stage has it."""
    found = spread(Padded, Layout(pp=2), "float64", blocks=[f"encoder.layers.{index}" for index in range(4)])
    forward = Forward(Tiny(), found, lambda batch: (batch,))
    forward.raw(words, found.bare())  # the first one finds what is sent
    found.bare().eval()
    with torch.no_grad():
        return forward.raw(words, found.bare())


@pytest.mark.distributed
def test_an_encoder_of_torch_evaluates_padded_sequences_stage_by_stage(pool: Pools) -> None:
    words = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    torch.manual_seed(0)
    expected = Padded().double()(words)[words != 0]
    nothing, output = pool(2).run(evaluate_padded, words)
    assert nothing is None and torch.allclose(output[words != 0], expected, atol=1e-12)
