"""Generators that are seeded by somebody else, that draw alike for other samples, or apart for the same."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from allranks.data.random_keys import device_key, last_key, note_devices, seed_all
from allranks.layout import Layout
from allranks.parallel.mesh import Mesh
from allranks.stepping import randomness
from tests import fake_cuda
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny
from tests.stepping.rounds import hold_round


class Seeding(Tiny):
    """Once it is armed, after what is checked at the start, its loss draws, and seeds wrongly; "" seeds none."""

    how: str = ""
    armed = False

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if not self.armed:
            return super().loss(output, batch)
        random.random(), np.random.rand(), torch.rand(1)
        if self.how == "torch":
            torch.manual_seed(17)
        if self.how == "numpy":
            np.random.seed(17)
        if self.how == "python" and dist.get_rank() == 1:
            random.random()
        if self.how == "forked":
            with torch.random.fork_rng():
                torch.manual_seed(17)
        return super().loss(output, batch)


def watched(how: str, layout: str, kind: str = "mlp", *overrides: str) -> Any:
    """What is noticed in two steps, and what a round after the first finds, by sentinel."""
    config = config_of(layout, "train.global_batch=8", "train.micro_batch=2", "guard.digest_every=1", *overrides)
    task = Seeding(kind=kind, how=how)
    session = session_of(task, config)
    task.armed = True
    found: dict[str, Any] = {}
    for number, _ in enumerate(step_through(session, 2), start=1):
        found |= {name: (one.kind, one.what) for name, one in hold_round(session, number).items()}
    return found | {name: (one.kind, one.what) for name, one in session.posted.watch.noticed.items()}


@pytest.mark.parametrize("how", ["", "forked"])
def test_one_rank_that_seeds_nothing_is_silent(how: str) -> None:
    assert watched(how, "single") == {}


def test_one_rank_alone_sees_that_torch_is_seeded_anew() -> None:
    found = watched("torch", "single")
    assert list(found) == ["randomness"] and found["randomness"][0] == "reseeded"
    assert found["randomness"][1].startswith("step 1: model or loss seeds torch's generator (cpu) anew, with 17")


CLEAN = [("ddp", "mlp"), ("fsdp", "transformer"), ("tp=2", "transformer"), ("cp=2", "transformer"), ("pp=2", "mlp")]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*one, marks=[pytest.mark.full] * (at > 2)) for at, one in enumerate(CLEAN)]
)
def test_ranks_that_seed_nothing_are_silent(pool: Pools, layout: str, kind: str) -> None:
    assert pool(2).run(watched, "", layout, kind) == [{}, {}]


@pytest.mark.distributed
def test_data_ranks_that_draw_alike_are_found(pool: Pools) -> None:
    for found in pool(2).run(watched, "numpy", "ddp"):
        kind, what = found["randomness"]
        assert kind == "randomness_wrong"
        assert "ranks 0 and 1 see other samples, but numpy's generator stands at the same number on both" in what


@pytest.mark.distributed
def test_ranks_of_one_layer_that_draw_apart_are_found(pool: Pools) -> None:
    for found in pool(2).run(watched, "python", "tp=2", "transformer"):
        assert "ranks 0 and 1 share the same samples and layers, but python's" in found["randomness"][1]


def test_digests_follow_what_is_drawn() -> None:
    seed_all(5)
    assert last_key() == 5
    before = randomness.generator_digests()
    assert randomness.generator_digests() == before, "looking draws nothing"
    random.random(), np.random.rand(), torch.rand(1)
    after = randomness.generator_digests()
    assert all(before[name] != after[name] for name in before) and set(before) >= {"python", "numpy", "torch"}


def test_every_device_of_the_process_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = fake_cuda.put_in(monkeypatch, 4, current=3)
    watch = randomness.Randomness(Mesh(Layout(), 0, None), due=lambda step: False)
    batch: Any = SimpleNamespace(step=4)
    seed_all(5)
    assert watch.look("", batch) is None and "CUDA (place 1)" not in randomness.generator_digests()
    note_devices((3, 2))
    seed_all(5)
    assert watch.look("", batch) is None
    before = randomness.generator_digests()
    torch.rand(1, generator=generators[2])
    after = randomness.generator_digests()
    assert {name for name in before if before[name] != after[name]} == {"CUDA (place 1)"}
    generators[2].manual_seed(17)
    found = watch.look("", batch)
    assert found is not None and found.kind == "reseeded"
    assert found.what.startswith("step 5: model or loss seeds torch's generator (cuda:2) anew, with 17")
    assert found.evidence == (f"it was seeded with {device_key(5, 1)} before the forward",)
