"""The plan beside a config file comes into the Run directory."""

from pathlib import Path

import pytest

from allranks.config import resolve_config
from allranks.run import Run
from allranks.training.plan_kept import decided_overrides, keep_plan, write_plan


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = resolve_config(task_defaults={}, toml=None, overrides=[])
    return Run.create(tmp_path / "runs", "Digits", config, {"task": "digits"})


def test_the_plan_beside_the_file_is_kept_as_it_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b'{"best": 1}')
    keep_plan(run, tmp_path / "RUN.toml")
    assert run.plan_path.read_bytes() == b'{"best": 1}'


def test_without_a_plan_there_is_none(run: Run, tmp_path: Path) -> None:
    keep_plan(run, tmp_path / "RUN.toml")
    keep_plan(run, None)
    (tmp_path / "plan.json").mkdir()
    keep_plan(run, tmp_path / "RUN.toml")
    assert not run.plan_path.exists()


def test_what_was_decided_reads_back(run: Run) -> None:
    assert decided_overrides(run) == ()
    write_plan(run, {"decided": ["layout.dp_shard=*", "train.micro_batch=2"]})
    assert decided_overrides(run) == ("layout.dp_shard=*", "train.micro_batch=2")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"decided": 3}', '{"decided": [3]}'])
def test_a_plan_that_decided_nothing_readable_holds_nothing(run: Run, text: str) -> None:
    run.plan_path.write_text(text)
    assert decided_overrides(run) == ()
