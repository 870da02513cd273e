"""Exact evaluation in an own loop: every sample once, whatever the number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import allranks
from allranks.run import Run
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, built, count, loss_of, refusal, sgd


@pytest.mark.parametrize(("size", "layout"), [(1, "single"), (3, "ddp"), (2, "dp_shard=2")])
@pytest.mark.parametrize("samples", [37, 2])
def test_every_sample_counts_once(pool: Pools, size: int, layout: str, samples: int) -> None:
    def case() -> tuple[dict[str, float], list[int], bool]:
        with allranks.join(layout=layout, precision="float64") as world:
            model = world.parallelize(built(7, dropout=0.5))
            seen: list[int] = []

            def measure(batch: Any) -> dict[str, Any]:
                real = batch["index"].tolist() if world.weight else []
                seen.extend(real)
                assert not torch.is_grad_enabled() and not model.training
                together = world.gather(batch["index"])
                indices = (batch["index"].sum(), len(batch["index"]))
                broken = 0.0 if world.weight else float("nan")
                return {
                    "loss": (loss_of(model, batch) + broken, count(batch)),
                    "index": indices,
                    "rows": (len(together), 1),
                }

            found = world.evaluate(Samples(samples), measure, batch=8, micro_batch=2)
            if layout == "dp_shard=2":
                assert all(isinstance(p, DTensor) for p in model.parameters() if p.dim()), "left gathered"
            return found, seen, model.training and world.weight == 1

    ranks = pool(size).run(case)
    model, whole = built(7).double(), Samples(samples)
    everything = torch.utils.data.default_collate([whole[index] for index in range(samples)])
    expected = float(loss_of(model, everything).detach()) / count(everything)
    assert sorted(index for _, seen, _ in ranks for index in seen) == list(range(samples))
    for found, _, as_before in ranks:
        assert found["loss"] == pytest.approx(expected, rel=1e-12)
        assert found["index"] == (samples - 1) / 2
        assert as_before


def test_it_is_recorded_and_leaves_training_as_it_is(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str, look: str) -> None:
        with allranks.join(layout="dp_shard=2", precision="float64", run=folder) as world:
            model = world.parallelize(built(7, dropout=0.5))
            optimizer = world.optimizer(model, sgd)

            def evaluate() -> None:
                world.evaluate(Samples(5), lambda b: {"loss": (loss_of(model, b), count(b))}, batch=4)

            for batch in world.stream(Samples(), global_batch=10):
                if look == "before the forward":
                    evaluate()
                world.backward(loss_of(model, batch), targets=count(batch))
                if look == "before the update":
                    evaluate()
                world.step(optimizer)

    places = ("never", "before the forward", "before the update")
    for look in places:
        pool(2).run(case, str(tmp_path / look), look)
    runs = [Run.open(tmp_path / look) for look in places]
    for run in runs[1:]:
        assert [step["loss"] for step in runs[0].steps()] == [step["loss"] for step in run.steps()]
        evaluations = [event for event in run.events() if event["event"] == "evaluation"]
        assert [event["step"] for event in evaluations] == [0, 1, 2, 3]
        assert all(event["metrics"]["loss"] > 0 for event in evaluations)


def test_what_is_no_measure_is_refused() -> None:
    with allranks.join() as world:
        world.parallelize(Net())
        wrong: list[Any] = [3, {"loss": 1.0}, {"loss": (1.0, "two")}, {"loss": (torch.ones(2), 1)}]
        found = [refusal(lambda given=given: world.evaluate(Samples(), lambda b: given, batch=37)) for given in wrong]  # type: ignore[misc]
    assert found == [
        "TaskError: world.evaluate: measure returned a int: return {name: (sum, count)}",
        "TaskError: world.evaluate: measure has 1.0 for loss: return {name: (sum, count)}",
        "TaskError: world.evaluate: measure has (1.0, 'two') for loss: return {name: (sum, count)}",
        "TaskError: world.evaluate: measure has (tensor([1., 1.]), 1) for loss: return {name: (sum, count)}",
    ]


@pytest.mark.parametrize("layout", ["ddp", "dp_shard=2"])
def test_names_may_depend_on_the_batch(pool: Pools, layout: str) -> None:
    """As those of classes do: one sample a batch, so that each rank meets other classes."""

    def case(layout: str) -> dict[str, float]:
        with allranks.join(layout=layout, precision="float64") as world:
            model = world.parallelize(built(7))

            def measure(batch: Any) -> dict[str, Any]:
                found = {"loss": (loss_of(model, batch), count(batch))}
                for label in batch["y"][batch["y"] >= 0].unique().tolist():
                    found[f"class {label}"] = (batch["index"].sum().item(), label + 1)
                return found | {f"sample {index}": (index, 1) for index in batch["index"].tolist()}

            return world.evaluate(Samples(9), measure, batch=2, micro_batch=1)

    [alone] = pool(1).run(case, "single")
    assert len(alone) > 9 + 3 and alone["sample 8"] == 8.0
    for found in pool(2).run(case, layout):
        assert found == pytest.approx(alone, rel=1e-12)
