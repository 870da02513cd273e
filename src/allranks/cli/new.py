"""`allranks new`: a commented, runnable Task to start from."""

from importlib import resources
from io import BufferedWriter
from pathlib import Path
from typing import Annotated

import typer

from allranks.cli.output import print_json
from allranks.errors import ConfigError


def new(
    path: Annotated[Path, typer.Argument(metavar="FILE.py", help="The file to write; it must not exist.")],
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Write a commented, runnable Task to start from."""
    if path.suffix != ".py":
        raise ConfigError(f"'{path}' is no Python file: write {path}.py")
    write_template(path)
    commands = [f"allranks train {path}", f"allranks train {path} --nproc 2 train.epochs=5 task.width=128"]
    if json:
        print_json({"file": str(path), "next": commands})
        return 0
    print(f"Wrote {path}: a small network that tells two spirals apart. Train it, then put your own model in it:\n")
    for command in commands:
        print(f"    {command}")
    return 0


def write_template(path: Path) -> None:
    """Write the template to `path`, whole or not at all.

    Raises ConfigError where something is there already or nothing can be.
    """
    text = resources.files("allranks.cli").joinpath("templates/task.py.txt").read_text(encoding="utf-8")
    # A name may have bytes that are no UTF-8, and Python's source may not.
    data = text.replace("{file}", str(path)).encode("utf-8", "backslashreplace")
    try:
        _write_new(path, data)
    except FileExistsError:
        raise ConfigError(f"'{path}' exists already, and is left as it is: name another file") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}") from None


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet; where that fails (a full disk), it is not there afterwards either."""
    file = path.open("xb")
    try:
        with file:
            _fill(file, data)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _fill(file: BufferedWriter, data: bytes) -> None:
    file.write(data)
