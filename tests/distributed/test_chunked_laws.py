"""A model that computes its loss in chunks computes, in every layout, what one device does with whole logits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.layout import Layout, parse_layout
from allranks.models.transformer import Transformer
from allranks.training.validate import validate
from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, processes_of, session_of
from tests.distributed.tasks import IGNORED, Tiny, Words

pytestmark = pytest.mark.distributed

STEPS = 3
OVERRIDES = (*SGD[:2], "optimizer.weight_decay=0", "train.global_batch=12", "train.micro_steps=2")
LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "grad_op": ("fsdp,sharding=grad_op", 3),
    "recompute": ("fsdp,recompute=full", 2),
    "pp": ("pp=2", 2),
    "cp": ("cp=2", 2),
    "tp": ("tp=2", 2),
    "tp of three": ("tp=3", 3),
    "tp-fsdp": ("tp=2,dp_shard=2", 4),
    "tp-pp": ("tp=2,pp=2", 4),
    "tp-cp": ("tp=2,cp=2", 4),
}


class Chunked(Tiny):
    """The model is given the targets, and returns losses."""

    tied: bool = True

    def model(self) -> nn.Module:
        return Transformer(11, 2, 48, 24, ffn=12, max_seq=6, num_kv_heads=12, tied=self.tied, chunk=5)

    def dataset(self, split: str) -> Any:
        return Words()

    def inputs(self, batch: Any) -> Any:
        return {"tokens": batch["x"], "targets": batch["y"]}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        found: torch.Tensor = output.sum()
        return found

    def metrics(self, output: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
        return {}


def record(layout: str, tied: bool) -> tuple[list[RecordedStep], dict[str, float]]:
    config = config_of(layout, *OVERRIDES, steps=STEPS)
    processes = processes_of(config)
    steps = record_run(Chunked(tied=tied), config, processes, STEPS)
    return steps, validate(session_of(Chunked(tied=tied), config, processes))


def data_ranks_of(layout: str, size: int) -> range:
    """One of the ranks that see the same samples, for each share of them."""
    degrees = Layout.resolve(parse_layout(layout), size)
    return range(0, size, degrees.tp * degrees.cp * degrees.pp)


def cases() -> list[Any]:
    """Of those with tp two in `make test`."""
    long = [(name, tied) for name in LAYOUTS for tied in (True, False) if "tp" in name]
    long = [case for case in long if case not in (("tp", False), ("tp-fsdp", True))]
    every = [(name, tied) for name in LAYOUTS for tied in (True, False)]
    ids = {True: "tied", False: "untied"}
    return [pytest.param(*c, marks=[pytest.mark.full] * (c in long), id=f"{c[0]}-{ids[c[1]]}") for c in every]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "tied"), cases())
def test_it_computes_what_one_device_does_with_whole_logits(pool: Pools, name: str, tied: bool) -> None:
    layout, size = LAYOUTS[name]
    ranks = pool(size).run(record, layout, tied)
    steps, measured = [steps for steps, _ in ranks], [metrics["loss"] for _, metrics in ranks]
    task = Chunked(tied=tied)
    dataset, model = task.dataset("train"), initial_model(task).double()
    data_ranks = data_ranks_of(layout, size)
    whole = [default_collate([dataset[s] for s in fed(steps, step, data_ranks).values()]) for step in range(STEPS)]

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(module(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")

    everything = default_collate([dataset[index] for index in range(len(dataset))])
    with torch.no_grad():
        expected = float(loss(model, everything)) / int((everything["y"] != IGNORED).sum())
    assert measured == [pytest.approx(expected, rel=1e-12)] * size
    work = [(batch, int((batch["y"] != IGNORED).sum())) for batch in whole]
    reference = plain_loop(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), work, loss)
    assert compare(steps, reference) == []
