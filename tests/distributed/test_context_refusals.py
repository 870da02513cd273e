"""What cp cannot cut is refused before the first step, in one line that says what to do."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.errors import AllranksError
from allranks.models.transformer import Transformer
from allranks.task import Hints
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.test_context_laws import RING, SEQ, VOCABULARY, Dropping, Sentence, Sentences

pytestmark = pytest.mark.distributed


def start(task: Any, layout: str, *overrides: str, precision: str = "float32", steps: int = 0) -> Any:
    """In a worker: the refusal, or what was decided."""
    try:
        session = session_of(task, config_of(layout, *overrides, precision=precision))
        list(step_through(session, steps) if steps else ())
    except AllranksError as error:
        return f"{type(error).__name__}: {error}"
    return [str(decision) for decision in session.decisions]


class Shifting(Sentence):
    """Its loss shifts the labels, as Hugging Face's models do."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        shifted = output[:, :-1].flatten(0, -2)
        return functional.cross_entropy(shifted, batch["y"][:, 1:].flatten(), reduction="sum")


class Blind(Transformer):
    """Counts its positions from 0 and takes no others."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens, torch.arange(tokens.shape[1]))


class Convolved(nn.Module):
    """Looks at its neighbours by other means than attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.near = nn.Embedding(VOCABULARY, 8), nn.Conv1d(8, VOCABULARY, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.near(self.words(x).transpose(1, 2)).transpose(1, 2)
        return found * 1.0


class Plain(nn.Module):
    """Attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.words(x)
        found: torch.Tensor = self.out((value @ value.mT).softmax(-1) @ value)
        return found


OTHERS = {"blind": lambda: Blind(VOCABULARY, 1, 16, 4, max_seq=SEQ), "convolved": Convolved, "plain": Plain}


class Other(Sentence):
    """One of OTHERS."""

    def model(self) -> nn.Module:
        return OTHERS[self.kind]()


class Pooled(Sentence):
    """One label a sample, which is no sequence."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

    def dataset(self, split: str) -> Any:
        return [{"x": sample["x"], "y": int(sample["x"][0])} for sample in (Sentences()[i] for i in range(9))]

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.mean(1), batch["y"], reduction="sum")


class Stepping(Sentence):
    """With a step of its own."""

    def step(self, models: Any, batch: Any) -> Any:
        yield "", self.loss(models(batch["x"]), batch), 1


class Hinted(Sentence):
    """A hint with a slip of the pen."""

    def hints(self) -> Hints:
        return Hints(sequence_dims={"xs": 1})


class Growing(Sentence):
    """From the tenth sample on its sequences are longer."""

    def dataset(self, split: str) -> Any:
        samples = [Sentences()[index % 29] for index in range(50)]
        return [
            {name: part[: 11 if i > 9 else 10] for name, part in sample.items()} for i, sample in enumerate(samples)
        ]

    def collate(self, samples: list[Any]) -> Any:
        length = max(len(sample["x"]) for sample in samples)
        return {
            name: torch.stack([functional.pad(sample[name], (0, length - len(sample[name]))) for sample in samples])
            for name in ("x", "y")
        }


class Remembering(Sentence):
    """Keeps what it has seen in a buffer."""

    def model(self) -> nn.Module:
        class Keeping(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words = nn.Embedding(VOCABULARY, VOCABULARY)
                self.register_buffer("mean", torch.zeros(()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.training:
                    self.mean = x.double().mean()
                found: torch.Tensor = self.words(x)
                return found

        return Keeping()


class Coupling(Sentence):
    """Couples its samples by what stands in the second half of each sequence."""

    def dataset(self, split: str) -> Any:
        half = torch.full((SEQ // 2,), VOCABULARY - 1)
        some = [Sentences()[index] for index in range(10)]
        return [{"x": s["x"], "y": torch.cat([s["y"][: SEQ // 2].clamp(max=VOCABULARY - 2), half])} for s in some]

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        coupled: torch.Tensor = output[batch["y"] == VOCABULARY - 1].sum() ** 2
        return super().loss(output, batch) + coupled


LOSS = "loss() looks at more than one position, or at what cp=2 has not cut: shift labels in"
MODEL = "With cp=2 forward gets a part of each sequence: what depends on positions needs the argument `positions`"


@pytest.mark.parametrize(
    ("task", "layout", "overrides", "parts"),
    [
        (
            Shifting(),
            "cp=2",
            (),
            ["LayoutError: layout cp=2 does not compute what one process computes: the loss is ", LOSS],
        ),
        (Shifting(), "cp=2", (RING,), [LOSS]),
        (Pooled(), "cp=2", (), ["LayoutError: layout cp=2 does not compute"]),
        (Other(kind="blind"), "cp=2", (), [MODEL]),
        (Other(kind="convolved"), "cp=2", (), [MODEL]),
        (Other(kind="plain"), "cp=2", (), [MODEL, "torch.nn.functional.scaled_dot_product_attention"]),
        (
            Sentence(),
            "cp=4",
            (RING,),
            ["LayoutError: 2 * cp(4) = 8 does not divide the 12 positions of entry 'x', because ring", "8 or 16 do"],
        ),
        (Sentence(kind="encoder"), "cp=4", (), ["LayoutError: cp(4) does not divide the 6 attention heads"]),
        (
            Sentence(kind="padded"),
            "cp=2",
            (RING,),
            ["LayoutError: ring attention over cp(2) cannot honour an attention"],
        ),
        (
            Stepping(),
            "cp=2",
            (),
            ["LayoutError: cp=2 cuts the batch", "Stepping has a step() of its own: leave cp out"],
        ),
        (Hinted(), "cp=2", (), ["LayoutError: hints().sequence_dims names 'xs', which no tensor", "did you mean 'x'?"]),
        (
            Remembering(),
            "cp=2",
            (),
            ["LayoutError: buffer mean", "each of 2 ranks sees samples or positions of its own"],
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Sentence) else None,
)
def test_it_is_refused(pool: Pools, task: Any, layout: str, overrides: tuple[str, ...], parts: list[str]) -> None:
    for found in pool(int(layout[-1])).run(start, task, layout, *overrides):
        assert isinstance(found, str), found
        assert all(part in found for part in parts), found
        assert "\n" not in found


def test_a_ring_does_not_drop(pool: Pools) -> None:
    def run() -> Any:
        return start(Dropping(), "cp=2", RING, "train.global_batch=4", steps=1)

    assert "ring attention over cp(2) cannot drop: set attention's dropout, 0.3, to 0" in pool(2).run(run)[0]


def test_a_length_that_comes_later_is_refused_when_it_comes(pool: Pools) -> None:
    def run() -> Any:
        return start(Growing(), "cp=2", "train.global_batch=5", "optimizer.name=sgd", steps=3)

    assert "cp(2) does not divide the 11 positions of entry 'x': 10 or 12 do" in pool(2).run(run)[0]


def test_what_is_right_passes_and_says_so(pool: Pools) -> None:
    for precision in ("float32", "bfloat16"):
        for overrides in (("train.global_batch=5",), ("train.global_batch=5", RING)):
            for found in pool(2).run(
                lambda given, of: start(Sentence(), "cp=2", *given, precision=of), overrides, precision
            ):
                assert any(said.startswith("the cut model computes what the whole one does") for said in found)
                assert any(said.startswith("each sequence is cut over cp=2: x, y, because they have") for said in found)


def test_what_one_process_alone_can_see_is_known_to_all(pool: Pools) -> None:
    found = pool(2).run(lambda: start(Coupling(), "cp=2", "train.global_batch=5"))
    for said in found:
        assert sum(line.startswith("the loss couples samples, because") for line in said) == 1, said
    assert any("it does so on another process" in line for line in found[0])
