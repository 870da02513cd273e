"""What ranks settle among themselves where another launcher has started them."""

import json
from pathlib import Path

import pytest

from allranks.run import Run
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, events, losses, train_outside

pytestmark = pytest.mark.distributed


def test_rank_0_decides_the_layout_and_all_train_under_it(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    run = tmp_path / "run"
    assert train_outside(pool, 2, "Curve", *QUICK, "train.steps=3", run=run, plans=True) == [0, 0]
    plan = json.loads(Run.open(run).plan_path.read_text())
    (told,) = [event for event in events(run, "decision") if event["what"].startswith("layout ")]
    assert told["what"].startswith(f"layout {plan['best']['layout']}, micro_batch") and told["because"]
    assert events(run, "start")[-1]["layout"] == plan["best"]["layout"] and list(losses(run)) == [1, 2, 3]
    assert train_outside(pool, 2, None, "train.steps=5", resume=run, plans=True) == [0, 0]
    assert json.loads(Run.open(run).plan_path.read_text()) == plan, "what goes on is not planned again"


def test_who_names_a_layout_is_not_planned(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_outside(pool, 2, "Curve", *QUICK, "train.steps=2", run=run, layout="fsdp", plans=True) == [0, 0]
    assert not Run.open(run).plan_path.exists() and events(run, "start")[-1]["layout"] == "dp_shard=2"
