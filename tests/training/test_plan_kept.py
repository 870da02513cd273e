"""The plan beside a config file comes into the Run directory."""

from pathlib import Path

import pytest

from allranks.config import resolve_config
from allranks.run import Run
from allranks.training.plan_kept import keep_plan


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
