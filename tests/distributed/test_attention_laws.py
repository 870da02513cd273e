"""Laws 4, 6 and 8 for torch's own encoder and decoder under tp: padded sentences, packed projections cut further."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.hints import Hints, TensorStyle
from allranks.task import Task
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, initial_model, processes_of, session_of, together
from tests.distributed.tasks import IGNORED, NUM_SAMPLES
from tests.training.snapshots import check_exchange, loaded_parts, saved_parts

pytestmark = pytest.mark.distributed

STEPS = 3
PAD, WORDS, LONGEST = 0, 11, 6
# Two heads of five channels: of 15 packed rows two ranks hold 8 and 7, which are not as many of each matrix.
CHANNELS, HEADS = 10, 2
OVERRIDES = ("train.global_batch=12", "train.micro_steps=2")
SGD = ("optimizer.name=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.001", "optimizer.weight_decay=0.01")
LAYOUTS = {
    "tp": ("tp=2", 2),
    "tp-fsdp": ("tp=2,dp_shard=2", 4),
    "tp-ddp": ("tp=2,dp_replicate=2", 4),
    "tp-optimizer": ("tp=2,dp_shard=2,sharding=optimizer", 4),
    "tp-recompute": ("tp=2,dp_shard=2,sharding=grad_op,recompute=full", 4),
}


class Sentences(torch.utils.data.Dataset[Any]):
    """x: 2 to 6 words of 10, and padding behind; y: the words backwards, of which there are as many."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(1, WORDS, (2 + index % 5,), generator=torch.Generator().manual_seed(index))
        padding = LONGEST - len(words)
        return {
            "x": functional.pad(words, (0, padding), value=PAD),
            "y": functional.pad(words.flip(0), (0, padding), value=IGNORED),
        }


class Translator(nn.Module):
    """Words in, words out: an encoder that sees no padding, and a decoder that sees what is behind it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        options: dict[str, Any] = {"dropout": dropout, "batch_first": True}
        self.words, self.head = nn.Embedding(WORDS, CHANNELS), nn.Linear(CHANNELS, WORDS, bias=False)
        self.positions = nn.Parameter(torch.randn(LONGEST, CHANNELS))
        encoder = nn.TransformerEncoderLayer(CHANNELS, HEADS, 12, **options)
        decoder = nn.TransformerDecoderLayer(CHANNELS, HEADS, 12, activation="gelu", norm_first=True, **options)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = x == PAD
        value = self.words(x) + self.positions
        causal = torch.ones(LONGEST, LONGEST, dtype=torch.bool, device=x.device).triu(1)
        memory = self.encoder(value, src_key_padding_mask=padding)
        found = self.decoder(
            value, memory, tgt_mask=causal, tgt_key_padding_mask=padding, memory_key_padding_mask=padding
        )
        output: torch.Tensor = self.head(found)
        return output


# What the page on splitting layers shows.
RULES: dict[str, TensorStyle] = {
    "words": "vocab",
    "*.self_attn": "heads",
    "*.multihead_attn": "heads",
    "*.linear1": "colwise",
    "*.linear2": "rowwise",
    "head": "vocab",
}


class Translation(Task):
    dropout: float = 0.0
    ruled: bool = False

    def hints(self) -> Hints:
        return Hints(tensor=RULES if self.ruled else {})

    def model(self) -> nn.Module:
        return Translator(self.dropout)

    def dataset(self, split: str) -> Any:
        return Sentences()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten(), reduction="sum")


def record(
    layout: str, optimizer: Sequence[str], ruled: bool
) -> tuple[list[RecordedStep], dict[str, float], list[str]]:
    """In a worker: some steps, and what an evaluation of an untrained model finds."""
    config = config_of(layout, *OVERRIDES, *optimizer, "train.max_norm=0.05", steps=STEPS)
    processes = processes_of(config)
    steps = record_run(Translation(ruled=ruled), config, processes, STEPS)
    fresh = session_of(Translation(ruled=ruled), config, processes)
    return steps, validate(fresh), [str(decision) for decision in fresh.spread.decisions]


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_computes_what_one_device_does(pool: Pools, name: str, optimizer: Sequence[str]) -> None:
    check(pool, name, optimizer, ruled=False)


@pytest.mark.full
def test_by_hints_it_does_too(pool: Pools) -> None:
    check(pool, "tp-fsdp", SGD, ruled=True)


def check(pool: Pools, name: str, optimizer: Sequence[str], *, ruled: bool) -> None:
    layout, size = LAYOUTS[name]
    recorded = pool(size).run(record, layout, optimizer, ruled, timeout=120)
    ranks = [steps for steps, _, _ in recorded]
    task = Translation()
    dataset, model = task.dataset("train"), initial_model(task).double()
    batches = [default_collate([dataset[s] for s in fed(ranks, step, range(0, size, 2)).values()]) for step in range(3)]
    everything = default_collate([dataset[index] for index in range(len(dataset))])
    with torch.no_grad():
        model.eval()
        expected = float(task.loss(model(everything["x"]), everything)) / int((everything["y"] != IGNORED).sum())
        model.train()
    for _, measured, decisions in recorded:
        assert measured["loss"] == pytest.approx(expected, rel=1e-12)
        # self-attention in all four layers, the decoder's two more, and two linear layers in each; and both ends
        cut = f"{16 if ruled else 14} layers are cut over tp=2"
        assert any(cut in decision for decision in decisions), decisions

    def make(parameters: Any) -> torch.optim.Optimizer:
        if optimizer is SGD:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.01)

    work = [(batch, int((batch["y"] != IGNORED).sum())) for batch in batches]
    reference = plain_loop(model, make, work, lambda module, batch: task.loss(module(batch["x"]), batch), 0.05)
    assert compare(ranks, reference, adaptive=optimizer is ADAMW) == []


LOCAL_TP = config_of("tp=2", *OVERRIDES, *SGD)
PAIRS = [
    *((name, "single") for name in LAYOUTS if name != "tp-recompute"),
    ("single", "tp"),
    ("single", "tp-fsdp"),
    ("single", "tp-optimizer"),
    ("tp", "tp-fsdp"),
    ("tp-fsdp", "tp-ddp"),
    ("tp-optimizer", "tp"),
    ("fsdp", "tp-fsdp"),
    ("tp-fsdp", "fsdp"),
]


@pytest.fixture(scope="module")
def alone(pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What one device holds after two steps."""
    directory = tmp_path_factory.mktemp("alone")
    return together(pool(1).run(saved_parts, directory, Translation(), config_of("single", *OVERRIDES, *ADAMW), 2))


@pytest.mark.full
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name)
def test_one_layout_loads_what_another_saved(
    pool: Pools, tmp_path: Path, alone: dict[str, torch.Tensor], one: str, other: str
) -> None:
    """Bit by bit; and each row is in its place, where two that are wrong alike would agree."""
    layouts = LAYOUTS | {"single": ("single", 1), "fsdp": ("fsdp", 3)}
    both = [(config_of(layout, *OVERRIDES, *ADAMW), size) for layout, size in (layouts[one], layouts[other])]
    exchanged = check_exchange(pool, tmp_path, Translation(), both[0], both[1], steps=2)
    assert exchanged["encoder.layers.0.self_attn.in_proj_weight"].shape == (3 * CHANNELS, CHANNELS)
    state = exchanged["optimizer.exp_avg.decoder.layers.1.multihead_attn.in_proj_bias"]
    assert state.shape == (3 * CHANNELS,) and state.abs().max() > 0
    for name in (name for name in alone if name.startswith("optimizer.exp_avg.")):
        torch.testing.assert_close(exchanged[name], alone[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.full
def test_copies_that_train_by_themselves_go_on_from_their_mean(pool: Pools, tmp_path: Path) -> None:
    """Of what each keeps, a packed matrix is cut like any other, with a row for the copy in front."""
    apart = config_of("dp_replicate=2,tp=2", *OVERRIDES, *SGD, "layout.local_sgd=3")
    ranks = pool(4).run(saved_parts, tmp_path, Translation(), apart, 2)
    copies = [together(ranks[:2]), together(ranks[2:])]
    after = together([parts for parts, _ in pool(2).run(loaded_parts, tmp_path, Translation(), LOCAL_TP)])
    momentum = {name: value for name, value in after.items() if name.startswith("optimizer.momentum_buffer.")}
    assert "optimizer.momentum_buffer.encoder.layers.0.self_attn.in_proj_weight" in momentum
    for name, value in momentum.items():
        assert not torch.equal(copies[0][name], copies[1][name])
        torch.testing.assert_close(value, (copies[0][name] + copies[1][name]) / 2, rtol=1e-12, atol=1e-15)


def losses(layout: str) -> list[float]:
    config = config_of(layout, *OVERRIDES, *SGD, steps=2)
    return [step.loss for step in record_run(Translation(dropout=0.5), config, processes_of(config), 2)]


def test_dropout_is_the_same_each_time_and_on_every_rank(pool: Pools) -> None:
    """Law 6: its mask is a function of the seed; another layout draws others."""
    first, again = (pool(2).run(losses, "tp=2") for _ in range(2))
    assert first == again and first[0] == first[1]
    assert first[0] != pool(1).run(losses, "single")[0]
