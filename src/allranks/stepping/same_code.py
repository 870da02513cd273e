"""What code every process runs: another Task, another torch on one of them would train something else in silence."""

import hashlib
import inspect
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from allranks import __version__
from allranks.errors import TaskError
from allranks.users_code import is_installed

DIGEST_LETTERS, NAMED = 12, 3
_OURS = Path(__file__).parents[1]


def code_of(task: type) -> dict[str, str]:
    """File -> digest of its content, of the Task's own and of those beside and below it that it has imported; and what
    is installed -> its version.
    """
    found = {"allranks": __version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        own = Path(inspect.getsourcefile(task) or "")
    except (TypeError, OSError):  # of a notebook, or of a function that was sent here
        return found
    for file in sorted({own, *_imported_beside(own)}):
        try:
            content = file.read_bytes()
        except OSError:  # gone since it was imported, or in an archive
            continue
        found[str(file.relative_to(own.parent))] = digest_of(content)
    return found


def find_other_code(told: Sequence[tuple[str, Mapping[str, str]]]) -> TaskError | None:
    """The error for the first rank whose (host, code) is not rank 0's; of files those count that both have imported."""
    first_host, first = told[0]
    for rank, (host, code) in enumerate(told):
        differing = [name for name in first if name in code and code[name] != first[name]]
        if differing:
            shown = ", ".join(f"{name} is {code[name]} instead of {first[name]}" for name in differing[:NAMED])
            more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
            return TaskError(
                f"rank {rank} on {host} runs other code than rank 0 on {first_host}: {shown}{more} (of files the first "
                "letters of their SHA-256); give every process the same files and versions"
            )
    return None


def _imported_beside(own: Path) -> list[Path]:
    """The files in the folder of `own` or below it that are imported: the user's, not what is installed there."""
    imported = (str(getattr(module, "__file__", None)) for module in list(sys.modules.values()))
    # Thousands of modules: most are told apart by their first letters, without a Path of each.
    letters = str(own.parent) if own.is_absolute() else ""
    files = [Path(file) for file in imported if file.endswith(".py") and file.startswith(letters)]
    return [file for file in files if file.is_relative_to(own.parent) and not _is_installed(file)]


def _is_installed(file: Path) -> bool:
    """Whether a version stands for it: packages, and allranks where it is worked on."""
    return file.is_relative_to(_OURS) or is_installed(file)


def digest_of(content: bytes) -> str:
    """The first letters of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_LETTERS]
