"""float16 with a step() of the Task's own: one scale, and each optimizer skips by itself, as torch recommends it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.task import Task
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, initial_model, parts_of, session_of, step_through, together

pytestmark = pytest.mark.distributed

STEPS, MAX_NORM = 10, 2.0
SGD = ("optimizer.name=sgd", "optimizer.lr=0.01", "optimizer.momentum=0.9", "optimizer.weight_decay=0")
LAYOUTS = {"single": ("single", 1), "ddp": ("ddp", 2), "fsdp": ("fsdp", 2)}
TOLERANCE = {"single": 0.0, "ddp": 0.0, "fsdp": 1e-6}


def layers(outputs: int) -> nn.Module:
    """Equal layers, so that sharded layouts find units."""
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, outputs))


class Duel(Task):
    """Two models that learn by turns; samples weigh heavily in the loss of one, others in that of the other."""

    def model(self) -> Any:
        return {"maker": layers(6), "judge": layers(1)}

    def dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(5)
        weights = [(300.0 if i % 11 == 4 else 1.0, 300.0 if i % 7 == 2 else 1.0) for i in range(61)]
        rows = torch.randn(61, 6, generator=generator)
        return [{"x": rows[i], "weights": torch.tensor(weights[i]), "count": i % 3} for i in range(61)]

    def step(self, models: Any, batch: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Targets differ by sample, so that micro-steps and ranks have unevenly many."""
        targets, weights = int(batch["count"].sum()), batch["weights"].unsqueeze(2)
        made = models["maker"](batch["x"])
        yield "judge", ((models["judge"](made.detach()) - 1.0).square() * weights[:, 0]).sum(), targets
        yield "maker", (models["judge"](made).square() * weights[:, 1]).sum(), targets


Told = list[tuple[dict[str, float], list[list[int]], Parts]]


def run(layout: str, micro_steps: int) -> Told:
    """In a worker: what each step told of its scale, the samples of this rank's forwards, and all parts."""
    cut = ("train.global_batch=8", f"train.micro_steps={micro_steps}", f"train.max_norm={MAX_NORM}")
    session, found = session_of(Duel(), config_of(layout, *cut, *SGD, precision="float16", steps=STEPS)), Told()
    for stepped in step_through(session, STEPS):
        assert stepped.outcome.scaling is not None
        samples = [[int(sample) for sample in m.samples] for m in stepped.batch.micro_steps if m.weight]
        found.append((stepped.outcome.scaling.values(), samples, parts_of(session)))
    return found


Simulated = tuple[float, dict[str, bool], dict[str, torch.Tensor]]


def simulate(samples: list[list[list[list[int]]]]) -> list[Simulated]:
    """The same with one GradScaler in one process: of each step its scale, who has skipped, and the parameters.

    Args:
        samples: of each step, rank and forward.
    """
    task = Duel()
    dataset, models = task.dataset("train"), initial_model(task)
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True) for name, model in models.items()
    }
    scaler, found = torch.amp.GradScaler("cpu"), list[Simulated]()
    scaler.scale(torch.zeros(()))
    for ranks in samples:
        scale, skipped = scaler.get_scale(), {}
        batches = [[default_collate([dataset[i] for i in own]) for own in forwards] for forwards in ranks]
        turns = [[task.step(models, batch) for batch in own] for own in batches]
        targets = sum(int(batch["count"].sum()) for own in batches for batch in own)
        promised = sum(int(own[0]["count"].sum()) * len(own) for own in batches)
        for name in ("judge", "maker"):
            for index in range(len(turns[0])):
                for own in turns:
                    with torch.autocast("cpu", torch.float16):
                        which, loss, _ = next(own[index])
                    assert which == name
                    scaler.scale(loss / promised).backward()
            scaler.unscale_(optimizers[name])
            parameters = list(models[name].parameters())
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad *= promised / targets
            norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            skipped[name] = not bool(norm.isfinite())
            if not skipped[name]:  # torch's fused SGD leaves its momentum undefined where its first step is skipped
                scaler.step(optimizers[name])
            for model in models.values():
                model.zero_grad()
        scaler.update()
        whole = {f"{name}.{key}": p.detach().clone() for name, m in models.items() for key, p in m.named_parameters()}
        found.append((scale, skipped, whole))
    return found


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_optimizer_skips_by_itself_and_all_ranks_alike(pool: Pools, name: str, micro_steps: int) -> None:
    layout, size = LAYOUTS[name]
    ranks = pool(size).run(run, layout, micro_steps)
    told = [[values for values, _, _ in steps] for steps in ranks]
    assert all(other == told[0] for other in told)
    expected = simulate([[steps[step][1] for steps in ranks] for step in range(STEPS)])
    assert [values["loss_scale"] for values in told[0]] == [scale for scale, _, _ in expected]
    either = [any(skipped.values()) for _, skipped, _ in expected]
    assert ["skipped" in values for values in told[0]] == either and not all(either[-3:])
    alone = {name for _, skipped, _ in expected if len(set(skipped.values())) == 2 for name in skipped if skipped[name]}
    assert alone, "in one step one has skipped, and the other has not"
    assert told[0][-1]["skipped_steps"] == sum(either)
    for step, (_, _, parameters) in enumerate(expected):
        found = together([steps[step][2] for steps in ranks])
        for key, value in parameters.items():
            far, largest = float((found[key] - value).abs().max()), float(value.abs().max())
            tolerance = TOLERANCE[name] if micro_steps == 1 else 1e-6  # four forwards are added up in another order
            assert far <= tolerance * largest, (step, key, far, largest)
