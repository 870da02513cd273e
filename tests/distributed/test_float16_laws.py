"""float16: every rank rounds its share by itself, gradients are summed in float32, and steps are skipped by all."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pools
from tests.distributed.scaled import ADAM, MAX_NORM, SGD, STEPS, Heavy, check_parameters, check_skips, simulate
from tests.distributed.sessions import Parts, config_of, parts_of, session_of, step_through, together
from tests.training.snapshots import contents_of, find, saver_of

pytestmark = pytest.mark.distributed

# A name in it is replaced below, which a type checker would only allow for names that it exports.
optimizer_module: Any = importlib.import_module("allranks.stepping.optimizer")

COMMON = ("train.global_batch=8", f"train.max_norm={MAX_NORM}", "train.ema=0.5")
LAYOUTS = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
    "optimizer": ("dp_shard=*,sharding=optimizer", 2),
    "tp": ("tp=2", 2),
    "pp": ("pp=2", 2),
    "ep": ("dp_replicate=2,ep=2", 2),
    "ulysses": ("cp=2", 2),
    "ring": ("cp=3", 3),
    "placement": ("placement", 1),
    "placed-ddp": ("ddp", 2),
    "pp-fsdp": ("pp=2,dp_shard=2", 4),
    "pp-ddp": ("pp=2,dp_replicate=2", 4),
    "pp-tp": ("pp=2,tp=2", 4),
}
KINDS = {"ep": "moe", **dict.fromkeys(("placement", "placed-ddp", "ulysses", "ring"), "transformer")}
KINDS |= dict.fromkeys(("tp", "pp", "pp-fsdp", "pp-ddp", "pp-tp"), "transformer")
RULES = 'layout.placement={"layers.0" = "cpu:2", "layers.1.attention*" = "cpu:1", "norm" = "cpu:3"}'
MORE = {
    "ulysses": ("layout.context=ulysses",),
    "ring": ("layout.context=ring",),
    "placement": (RULES,),
    "placed-ddp": (RULES,),
}
# Up to two ranks a sum has one order: bit by bit. Measured: 1e-7 where gradients are sharded; 5e-6 under placement,
# whose norm is added up device by device; 5e-4 under tp, cp, ep and pp, which round other parts.
CUT = ("tp", "pp", "ep", "ulysses", "ring", "pp-fsdp", "pp-ddp", "pp-tp")
TOLERANCE = {"single": 0.0, "ddp": 0.0, "placement": 4e-5, "placed-ddp": 4e-5} | dict.fromkeys(CUT, 4e-3)


# Under the ring with Adam, which divides noise by eps, a step on the edge (the sixth) is skipped one later than in the
# simulation; both come to the same scale.
ROWS = [
    pytest.param(name, optimizer, id=f"{name}-{which}")
    for name in LAYOUTS
    for which, optimizer in (("sgd", SGD), ("adamw", ADAM))
    if (name, which) != ("ring", "adamw")
]
Told = list[tuple[dict[str, float], dict[str, torch.Tensor], list[list[int]]]]


def run(name: str, kind: str, optimizer: Sequence[str], on_device: bool = False) -> tuple[Told, list[Parts]]:
    """In a worker: what each step told of its scale, the averages after it and the samples of each forward; all parts.

    Ranks that see the samples of another one name none.
    """
    kept = optimizer_module.skips_on_device
    if on_device:
        optimizer_module.skips_on_device = lambda *_: True
    try:
        config = config_of(LAYOUTS[name][0], *COMMON, *optimizer, *MORE.get(name, ()), precision="float16", steps=STEPS)
        session, told, parts = session_of(Heavy(kind=kind), config), [], list[Parts]()
        assert session.ema is not None
        for stepped in step_through(session, STEPS):
            assert stepped.outcome.scaling is not None
            averages = {entry.name: part.clone() for entry, part in session.ema.parts()}
            fed = stepped.batch.micro_steps if session.processes.mesh.counts else ()
            samples = [[int(sample) for sample in m.samples] for m in fed if m.weight]
            told.append((stepped.outcome.scaling.values(), averages, samples))
            parts.append(parts_of(session))
        return told, parts
    finally:
        optimizer_module.skips_on_device = kept


@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "optimizer"), ROWS)
def test_all_ranks_skip_together_and_train_on(pool: Pools, name: str, optimizer: Sequence[str]) -> None:
    kind = KINDS.get(name, "mlp")
    ranks = pool(LAYOUTS[name][1]).run(run, name, kind, optimizer)
    told = [[values for values, _, _ in told] for told, _ in ranks]
    assert all(other == told[0] for other in told)
    samples = [[own for told, _ in ranks for own in told[step][2]] for step in range(STEPS)]
    expected = simulate(kind, optimizer, samples)
    check_skips(told[0], expected, samples)
    if optimizer is SGD or name not in KINDS:  # Adam divides noise by eps
        found = [together([parts[step] for _, parts in ranks]) for step in range(STEPS)]
        check_parameters(found, expected, TOLERANCE.get(name, 1e-6))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "optimizer"])
def test_a_skipped_step_leaves_everything_as_it_was(pool: Pools, name: str) -> None:
    for optimizer in (SGD, ADAM):
        for told, parts in pool(LAYOUTS[name][1]).run(run, name, "mlp", optimizer):
            for step in range(1, STEPS):
                same = all(torch.equal(part, parts[step - 1][key][2]) for key, (_, _, part) in parts[step].items())
                averages = zip(told[step][1].values(), told[step - 1][1].values(), strict=True)
                same_average = all(torch.equal(one, other) for one, other in averages)
                first = parts[step].keys() != parts[step - 1].keys()  # the optimizer's state came with its first step
                assert (same, same_average) == (("skipped" in told[step][0]),) * 2 or first


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "optimizer"])
def test_kernels_that_skip_by_themselves_come_to_the_same(pool: Pools, name: str) -> None:
    host, device = (pool(LAYOUTS[name][1]).run(run, name, "mlp", ADAM, on_device) for on_device in (False, True))
    for (told, parts), (others, other_parts) in zip(host, device, strict=True):
        assert [values for values, _, _ in told] == [values for values, _, _ in others]
        assert all(torch.equal(part, other_parts[-1][key][2]) for key, (_, _, part) in parts[-1].items())


def halfway(directory: Path, layout: str) -> None:
    """In a worker: three steps and a checkpoint."""
    config = config_of(layout, *COMMON, *ADAM, precision="float16", steps=STEPS)
    session, contents = contents_of(Heavy(), config, 3)
    saver_of(session, contents, directory).save(3)


def go_on(directory: Path | None, layout: str) -> tuple[list[dict[str, float]], Parts]:
    """In a worker: the steps after the third, from that checkpoint or (None) from the beginning; what is held then."""
    config = config_of(layout, *COMMON, *ADAM, precision="float16", steps=STEPS)
    session, contents = contents_of(Heavy(), config, 0 if directory is not None else 3)
    if directory is not None:
        assert contents.load(find(directory, session)) == ()
    told = [s.outcome.scaling.values() for s in step_through(session, STEPS - 3) if s.outcome.scaling is not None]
    return told, parts_of(session)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_scale_goes_on_where_it_stood(pool: Pools, tmp_path: Path, name: str) -> None:
    layout, size = LAYOUTS[name]
    pool(size).run(halfway, tmp_path, layout)
    for (told, parts), (expected, whole) in zip(
        pool(size).run(go_on, tmp_path, layout), pool(size).run(go_on, None, layout), strict=True
    ):
        assert told == expected and told[0]["loss_scale"] < 2**16
        assert all(torch.equal(part, whole[key][2]) for key, (_, _, part) in parts.items())
    ((elsewhere, _),) = pool(1).run(go_on, tmp_path, "single")
    assert elsewhere == expected
