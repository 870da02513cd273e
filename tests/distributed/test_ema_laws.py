"""The average of the parameters (train.ema) is, in every layout, that of a plain loop on one device; it moves on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.training.load import read_model
from allranks.training.validate import validate
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import Parts, config_of, initial_model, parts_of, session_of, step_through, together
from tests.distributed.tasks import IGNORED, Tiny, Words
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

STEPS, DECAY, GLOBAL_BATCH = 4, 0.8, 12
OVERRIDES = (f"train.ema={DECAY}", f"train.global_batch={GLOBAL_BATCH}", "optimizer.name=sgd", "optimizer.lr=0.1")

LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 3),
    "grad_op": ("fsdp,sharding=grad_op", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "optimizer": ("dp_shard=*,sharding=optimizer", 3),
    "tp": ("tp=3", 3),
    "tp-fsdp": ("tp=2,dp_shard=2", 4),
    "pp": ("pp=2", 2),
    "pp-optimizer": ("pp=2,dp_shard=2,sharding=optimizer", 4),
    "cp": ("cp=2", 2),
    "ep": ("dp_replicate=2,ep=2", 2),
    "ep-shards": ("dp_shard=4,ep=2", 4),
}
PAIRS = [
    ("single", "fsdp"),
    ("fsdp", "tp"),
    ("tp-fsdp", "optimizer"),
    ("optimizer", "pp-optimizer"),
    ("pp", "ddp"),
    ("cp", "single"),
]


class Steady(Tiny):
    """The same samples in every step; a validation split of all of them."""

    def dataset(self, split: str) -> Any:
        words = Words()
        return [words[index] for index in range(GLOBAL_BATCH if split == "train" else 61)]


def task_of(layout: str) -> Steady:
    return Steady(kind="moe" if layout.startswith("ep") else "transformer")


def averages(contents: Any) -> Parts:
    """What this rank holds of every average."""
    held = [(entry, part) for entry, part in contents.parts() if entry.name.startswith("ema.")]
    return {entry.name.removeprefix("ema."): (entry.shape, entry.box, part.clone()) for entry, part in held}


def follow(name: str) -> tuple[Parts, dict[str, float], bool]:
    """In a worker: the averages after some steps, what validation measures, and whether that left no trace."""
    task = task_of(name)
    session, contents = contents_of(task, config_of(LAYOUTS[name][0], *OVERRIDES, steps=STEPS), STEPS)
    found, before = averages(contents), parts_of(session)
    measured = validate(session)
    after, still = parts_of(session), averages(contents)
    same = [torch.equal(part, after[key][2]) for key, (_, _, part) in before.items()]
    same += [torch.equal(part, still[key][2]) for key, (_, _, part) in found.items()]
    return found, measured, all(same)


def reference(name: str) -> tuple[dict[str, torch.Tensor], float]:
    """The averages, and the validation loss of a model that has them, by a plain loop."""
    task = task_of(name)
    model = initial_model(task).double()
    kept = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}

    def finish(trained: nn.Module) -> None:
        if name.startswith("ep"):
            trained.update_balance()  # type: ignore[operator]
        for key, parameter in trained.named_parameters():
            kept[key] = DECAY * kept[key] + (1 - DECAY) * parameter.detach()

    batch = default_collate([task.dataset("train")[index] for index in range(GLOBAL_BATCH)])
    work = [(batch, int((batch["y"] != IGNORED).sum()))] * STEPS
    plain_loop(model, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), work, loss, finish=finish)
    model.load_state_dict(kept, strict=False)
    everything = default_collate(list(task.dataset("validation")))
    with torch.no_grad():
        return kept, float(loss(model.eval(), everything)) / int((everything["y"] != IGNORED).sum())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return Tiny().loss(model(batch["x"]), batch)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_average_is_that_of_one_device(pool: Pools, name: str) -> None:
    ranks = pool(LAYOUTS[name][1]).run(follow, name)
    found = together([parts for parts, _, _ in ranks])
    expected, measured = reference(name)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-12 * value.abs().max(), key
    for _, metrics, left_no_trace in ranks:
        assert metrics["loss"] == pytest.approx(measured, rel=1e-12)
        assert left_no_trace


def save(directory: Path, name: str) -> Parts:
    session, contents = contents_of(task_of(name), config_of(LAYOUTS[name][0], *OVERRIDES), 3)
    saver_of(session, contents, directory).save(3)
    return averages(contents)


def load(directory: Path, name: str) -> Parts:
    session, contents = contents_of(task_of(name), config_of(LAYOUTS[name][0], *OVERRIDES), 0)
    assert contents.load(find(directory, session)) == ()
    return averages(contents)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_one_layout_loads_the_average_that_another_saved(pool: Pools, tmp_path: Path, one: str, other: str) -> None:
    before = together(pool(LAYOUTS[one][1]).run(save, tmp_path, one))
    after = together(pool(LAYOUTS[other][1]).run(load, tmp_path, other))
    assert after.keys() == before.keys() and len(before) > 15
    assert all(torch.equal(after[name], before[name]) for name in before)


def resume(directory: Path, layout: str, overrides: Sequence[str]) -> tuple[list[str], Parts, Parts]:
    """In a worker: what a resume with other settings says, its averages, and its parameters."""
    session, contents = contents_of(task_of("fsdp"), config_of(layout, *overrides), 0)
    decisions = contents.load(find(directory, session))
    own = {key: part for key, part in parts_of(session).items() if not key.startswith("optimizer.")}
    return [decision.what for decision in decisions], averages(contents), own


@pytest.mark.full
def test_an_average_may_begin_and_end_at_a_resume(pool: Pools, tmp_path: Path) -> None:
    without = OVERRIDES[1:]
    pool(3).run(save, tmp_path / "with", "fsdp")
    for layout, size in (("fsdp", 3), ("ddp", 2)):
        for said, found, _ in pool(size).run(resume, tmp_path / "with", layout, without):
            assert (said, found) == (["the average of the parameters ends here"], {})

    def save_without(directory: Path) -> None:
        session, contents = contents_of(task_of("fsdp"), config_of("fsdp", *without), 3)
        saver_of(session, contents, directory).save(3)

    pool(3).run(save_without, tmp_path / "without")
    for layout, size in (("fsdp", 3), ("ddp", 2)):
        for said, found, own in pool(size).run(resume, tmp_path / "without", layout, OVERRIDES):
            assert said == ["the average of the parameters begins here"] and len(found) > 15
            assert all(torch.equal(part, own[name][2]) for name, (_, _, part) in found.items())


def test_a_model_is_loaded_with_its_averages(pool: Pools, tmp_path: Path) -> None:
    averaged = together(pool(3).run(save, tmp_path, "fsdp"))
    session, _ = contents_of(task_of("fsdp"), config_of("single", *OVERRIDES), 0)
    raw, smooth = (read_model(find(tmp_path, session), task_of("fsdp"), ema=ema) for ema in (False, True))
    assert isinstance(raw, nn.Module) and isinstance(smooth, nn.Module)
    assert all(torch.equal(parameter, averaged[name]) for name, parameter in smooth.named_parameters())
    assert not any(torch.equal(parameter, averaged[name]) for name, parameter in raw.named_parameters())


def test_a_session_without_it_has_none() -> None:
    session = session_of(Tiny(), config_of("single"))
    list(step_through(session, 1))
    assert session.ema is None and session.beside == ()
