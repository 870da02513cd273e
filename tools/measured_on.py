"""A sentence that says what stored figures were found on, or that nobody wrote it down."""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "No date or commit is on record for this run."


def render_origin(document: Mapping[str, Any]) -> str:
    """Date, commit, machine and load of a document with a key `machine`; of one without, that they are not known."""
    if "machine" not in document:
        return UNKNOWN
    machine, known = document["machine"], document.get("known", 0)
    commit = f"commit `{machine['commit']}`" if machine.get("commit") else f"allranks {machine['allranks']}"
    earlier = f" {known} of the results are an earlier run's of this very source." if known else ""
    return (
        f"On {machine['date'][:10]}, {commit}: {machine['cores']} CPU cores, torch {machine['torch']}, Python "
        f"{machine['python']}, under a load of {machine['load']} at the start, {machine['load_after']} at the "
        f"end.{earlier}"
    )
