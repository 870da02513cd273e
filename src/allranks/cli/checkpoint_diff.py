"""`allranks checkpoint diff A B`: what two checkpoints do not have in common, whatever layouts wrote them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allranks.cli.checkpoint_paths import find_newest
from allranks.cli.output import print_error, print_json, print_table
from allranks.errors import CheckpointError
from allranks.printable import printable

if TYPE_CHECKING:
    from allranks.checkpointing.comparing import Comparison, TensorDifference

DIFFERS, UNDETERMINED = 1, 3
SHOWN = 40  # of a state's values, which may be as many as a dataset has shards

Directory = Annotated[Path, typer.Argument(help="A run, its checkpoints folder, or one step-* directory.")]


def diff(
    first: Directory,
    second: Directory,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output, all else on standard error.")
    ] = False,
) -> int:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them.

    Of a run the newest counts. Values are read only where digests differ. Exit code 1: they differ; 3: one is damaged.
    """
    from allranks.checkpointing.checkpoint import Checkpoint
    from allranks.checkpointing.comparing import compare
    from allranks.checkpointing.reading import held

    paths = find_newest(first), find_newest(second)
    try:
        with held(paths[0]), held(paths[1]):
            found = compare(*(Checkpoint.open(path) for path in paths))
    except CheckpointError as error:
        return print_error(error, json=json, exit_code=UNDETERMINED)
    if json:
        print_json({"first": str(paths[0]), "second": str(paths[1]), **found.to_json()})
    else:
        _print(found, *paths)
    return 0 if found.equal else DIFFERS


def _print(found: "Comparison", first: Path, second: Path) -> None:
    print(f"first   {first}\nsecond  {second}\n")
    if found.tensors:
        headings = ("tensor", "", "first", "second", "elements", "largest difference", "relative", "at")
        print_table(headings, [_row(tensor) for tensor in found.tensors])
        print()
    for alias, names in found.aliases.items():
        mine, theirs = (f"is {name}" if name else "is a tensor of its own, or not there" for name in names)
        print(printable(f"{alias}: {mine} in the first, {theirs} in the second"))
    for path, values in list(found.state.items())[:SHOWN]:
        print(printable(f"state {path}: {_told(values[0])} in the first, {_told(values[1])} in the second"))
    if len(found.state) > SHOWN:
        print(f"and {len(found.state) - SHOWN} more values of the state")
    tensors = f"{found.num_equal} tensors are equal, {len(found.tensors)} differ"
    print(
        "equal: " + tensors if found.equal else f"{tensors}; so do {len(found.aliases)} ties, {len(found.state)} values"
    )


def _row(tensor: "TensorDifference") -> tuple[str, ...]:
    if not tensor.elements:
        same = "the same values" if tensor.what in ("retyped", "altered") else ""
        return (tensor.name, tensor.what, tensor.first, tensor.second, same, "", "", "")
    place = ",".join(map(str, tensor.index)) or "-"
    sizes = (str(tensor.elements), f"{tensor.absolute:.3g}", f"{tensor.relative:.2g}")
    return (tensor.name, tensor.what, tensor.first, tensor.second, *sizes, place)


def _told(value: Any) -> str:
    return "nothing" if value is None else repr(value)
