"""`allranks checkpoint import FILE OUT --task TASK`: a foreign model as a checkpoint, if it is the Task's model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allranks.cli.output import print_json, print_table, stdout_kept_free

if TYPE_CHECKING:
    from allranks.training.importing import Difference

DIFFERS = 1
SHOWN = 40


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt, .pth, .bin, .ckpt or .safetensors file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory that gets the checkpoint.")],
    task: Annotated[str, typer.Option(metavar="TASK", help="Whose model it is: file.py, file.py:Name ...")],
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Under which the file has the model.")] = None,
    cast: Annotated[bool, typer.Option("--cast", help="Take other types, in those of the model.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Write another program's model as a checkpoint.

    No code in the file is run. Exit code 1: it is not the model that the Task makes; each tensor that is missing,
    extra, reshaped or re-typed is named, and nothing is written.
    """
    with stdout_kept_free(json):
        from allranks.checkpointing.foreign import read_foreign
        from allranks.task import load_task
        from allranks.training.importing import compare_with, write_import

        found, said = read_foreign(file, key)
        fit = compare_with(load_task(task), found)
        fits = fit.fits(cast=cast)
        path = write_import(fit, out).path if fits else None
    if json:
        differences = [one.to_json() for one in fit.differences]
        print_json({"checkpoint": path and str(path), "tensors": len(found), "said": said, "differences": differences})
        return 0 if fits else DIFFERS
    for line in said:
        print(line)
    _print(fit.differences)
    if path is None:
        types = " (--cast takes other types)" if all(one.what == "retyped" for one in fit.differences) else ""
        print(f"{file} is not the model of {task}: {len(fit.differences)} tensors differ; nothing was written{types}")
        return DIFFERS
    print(f"Wrote {path}: {len(fit.values)} tensors of {file}")
    return 0


def _print(differences: "tuple[Difference, ...]") -> None:
    if not differences:
        return
    print_table(("tensor", "", "file", "model"), [(d.name, d.what, d.file, d.model) for d in differences[:SHOWN]])
    if len(differences) > SHOWN:
        print(f"and {len(differences) - SHOWN} more")
    print()
