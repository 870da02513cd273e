"""The commands that plan and rehearse take the same sizes, by the same names."""

import pytest
from typer.main import get_command

from allranks.cli.main import app, main
from allranks.plan_request import SIZES


@pytest.mark.parametrize("command", ["plan", "dryrun"])
def test_a_command_takes_every_size(command: str) -> None:
    options = {name for one in get_command(app).commands[command].params for name in one.opts}  # type: ignore[attr-defined]
    assert {f"--{size.replace('_', '-')}" for size in SIZES} <= options


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("given", ["0", "-3"])
def test_a_size_is_one_at_least(size: str, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan was of a dense model with `--experts 0`, and a dry run of the name's own."""
    option = f"--{size.replace('_', '-')}"
    for words in (["plan", "--cluster", "8:h100"], ["dryrun", "--cluster", "8:h100", "--layout", "fsdp"]):
        assert main([*words, "mixtral-8x7b", option, given]) == 2
        assert capsys.readouterr().err == (
            f"allranks: error: invalid value for '{option}': Input should be greater than or equal to 1\n"
        )
