"""`allranks checkpoint`: which checkpoints are there, what is in one, is it whole, how do two differ.

DIR is a run directory, its `checkpoints` folder, or one `step-*` directory. A checkpoint that stands there and
cannot be read is damaged: exit 1; so is what has only the name of one. A directory where none can be is no run: exit
78.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.checkpoint_diff import diff
from allranks.cli.checkpoint_import import import_file
from allranks.cli.checkpoint_paths import find_checkpoints, find_newest, find_passed_over
from allranks.cli.output import print_error, print_json, print_table
from allranks.errors import CheckpointError, ConfigError
from allranks.printable import printable
from allranks.units import format_bytes, format_count

if TYPE_CHECKING:
    from allranks.checkpointing.checkpoint import Checkpoint

DAMAGED = 1

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.command("diff")(diff)
app.command("import")(import_file)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run, its checkpoints folder, or one step-* directory.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")]


@app.callback()
def start(context: typer.Context) -> None:
    """List, show, verify, compare, export and import checkpoints."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_all(directory: Directory, json: Json = False) -> int:
    """List the checkpoints of a run, newest first.

    Their tensors are not read: `verify` does that.
    """
    rows = [describe(path) if reason is None else _describe_none(path, reason) for path, reason in _look(directory)]
    if json:
        print_json({"checkpoints": rows})
    elif not rows:
        print(f"{directory} holds no checkpoint yet")
    else:
        print_table(
            ("step", "samples", "saved", "size", "tensors", "layout", "state"),
            [_list_row(row) for row in rows],
        )
    return 0 if all(row["damage"] is None for row in rows) else DAMAGED


@app.command("show")
def show(directory: Directory, json: Json = False) -> int:
    """Show what the newest checkpoint, or the named one, holds."""
    path = find_newest(directory)
    row = describe(path)
    if row["damage"] is not None:
        return _print_damage(path, row["damage"], json=json)
    from allranks.checkpointing.manifest import encode_state

    manifest = _open(path).manifest
    if json:
        tensors = {name: tensor.model_dump(mode="json") for name, tensor in manifest.tensors.items()}
        print_json({**row, "tensors": tensors, "aliases": manifest.aliases, "state": encode_state(manifest.state)})
        return 0
    known = f"run {printable(manifest.run)}, layout {printable(manifest.layout)}"
    print(f"{path}: step {manifest.step}, {manifest.samples} samples, {known}\n")
    shapes = {name: "x".join(map(str, tensor.shape)) or "scalar" for name, tensor in manifest.tensors.items()}
    rows = [(name, tensor.dtype, shapes[name], tensor.digest) for name, tensor in manifest.tensors.items()]
    rows += [(alias, "", f"is {name}", "") for alias, name in manifest.aliases.items()]
    print_table(("tensor", "dtype", "shape", "digest"), rows)
    print(f"\nstate: {printable(', '.join(manifest.state)) or 'none'}")
    return 0


@app.command("verify")
def verify(directory: Directory, json: Json = False) -> int:
    """Read every byte and compare it with its digest.

    First the digests of the files, then those of the tensors.
    """
    paths = _look(directory)
    if not paths:
        raise CheckpointError(f"{directory} holds no checkpoint yet: there is nothing to verify")
    from allranks.checkpointing.reading import held

    verdicts = []
    for path, reason in paths:
        if reason is not None:
            row = _describe_none(path, reason)
        elif path.is_dir():
            with held(path):
                row = {**describe(path), "damage": find_damage(path)}
        else:
            continue  # its run was faster
        verdicts.append(row)
        if not json:
            size = f"{format_bytes(row['bytes'] or 0)}, {row['num_tensors']} tensors"
            print(_name_damage(path, row["damage"]) if row["damage"] else f"{path}: good ({size})", flush=True)
    good = all(row["damage"] is None for row in verdicts)
    if json:
        print_json({"good": good, "checkpoints": verdicts})
    return 0 if good else DAMAGED


@app.command("export")
def export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write; it must not exist.")],
    ema: Annotated[bool, typer.Option("--ema", help="The average of the parameters that train.ema kept.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="GLOB", help="These tensors alone, e.g. '*.up.weight'.")
    ] = None,
    json: Json = False,
) -> int:
    """Write the model as one safetensors file.

    The model of the newest checkpoint, or of the named one, under its own names: any program can read the file.
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"'{out}' is no safetensors file: write {out}.safetensors")
    if out.exists():
        raise ConfigError(f"'{out}' exists already, and is left as it is: name another file")
    path = find_newest(directory)
    from allranks.checkpointing.reading import held
    from allranks.cli.checkpoint_tensors import export_model

    try:
        with held(path):
            names = export_model(_open(path), out, ema=ema, only=only or ())
    except CheckpointError as error:
        return _print_damage(path, str(error), json=json)
    document = {"checkpoint": str(path), "file": str(out), "bytes": out.stat().st_size, "tensors": names}
    if json:
        print_json(document)
    else:
        print(f"Wrote {out}: {len(names)} tensors, {format_bytes(out.stat().st_size)}, from {path}")
    return 0


def describe(path: Path) -> dict[str, Any]:
    """A checkpoint as one JSON object; `damage` is None, or why its manifest or its files' lengths are wrong."""
    try:
        checkpoint = _open(path)
    except CheckpointError as error:
        return _describe_none(path, str(error))
    manifest = checkpoint.manifest
    return {
        **_describe_none(path, None),
        "step": manifest.step,
        "samples": manifest.samples,
        "bytes": checkpoint.num_bytes,
        "num_tensors": len(manifest.tensors),
        "layout": manifest.layout,
        "run": manifest.run,
        "generation": manifest.generation,
    }


def _describe_none(path: Path, damage: str | None) -> dict[str, Any]:
    saved = datetime.fromtimestamp(path.lstat().st_mtime, UTC).isoformat(timespec="seconds")
    empty = dict.fromkeys(("step", "samples", "bytes", "num_tensors", "layout", "run", "generation"))
    return {"path": str(path), "saved": saved, "damage": damage, **empty}


def _look(directory: Path) -> list[tuple[Path, str | None]]:
    """The checkpoints, newest first, and among them what has only the name of one, with why it is none."""
    found: list[tuple[Path, str | None]] = [(path, None) for path in find_checkpoints(directory)]
    passed = find_passed_over(directory)
    if not passed:
        return found
    return sorted([*found, *passed.items()], key=lambda one: int(one[0].name.removeprefix("step-")), reverse=True)


def find_damage(path: Path) -> str | None:
    """Why the checkpoint is not whole, after reading every byte of it; None where it is."""
    from allranks.cli.checkpoint_tensors import check_everything

    try:
        check_everything(_open(path))
    except CheckpointError as error:
        return str(error)
    return None


def _open(path: Path) -> "Checkpoint":
    from allranks.checkpointing.checkpoint import Checkpoint

    return Checkpoint.open(path)


def _print_damage(path: Path, damage: str, *, json: bool) -> int:
    print_error(CheckpointError(_name_damage(path, damage)), json=json, exit_code=DAMAGED)
    return DAMAGED


def _name_damage(path: Path, damage: str) -> str:
    return printable(damage if damage.startswith(str(path)) else f"{path}: {damage}")


def _list_row(row: dict[str, Any]) -> tuple[str, ...]:
    name = Path(row["path"]).name
    if row["damage"] is not None:
        return (name, "", row["saved"], "", "", "", f"damaged: {row['damage']}")
    tensors = format_count(row["num_tensors"])
    return (
        name,
        format_count(row["samples"]),
        row["saved"],
        format_bytes(row["bytes"]),
        tensors,
        row["layout"],
        "good",
    )
