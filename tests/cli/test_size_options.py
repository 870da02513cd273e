"""The commands that plan and rehearse take the same sizes, by the same names."""

import pytest
from typer.main import get_command

from allranks.cli.main import app
from allranks.plan_request import SIZES


@pytest.mark.parametrize("command", ["plan", "dryrun"])
def test_a_command_takes_every_size(command: str) -> None:
    options = {name for one in get_command(app).commands[command].params for name in one.opts}  # type: ignore[attr-defined]
    assert {f"--{size.replace('_', '-')}" for size in SIZES} <= options
