"""Bring any PyTorch model; allranks spreads it over processes, proves the spread run equal to one, and keeps it
running.

This is the front door. What stands in `__all__` is imported at its first use, so that `import allranks` and the
command line load neither torch nor numpy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.errors import AllranksError as AllranksError
    from allranks.hints import Hints as Hints
    from allranks.surviving.launch import launch as launch
    from allranks.task import Task as Task
    from allranks.training.door import join as join
    from allranks.training.load import load as load
    from allranks.verifying.own_verify import verify as verify

__version__ = "0.1.0"

__all__ = ["AllranksError", "Hints", "Task", "__version__", "join", "launch", "load", "verify"]

_HOMES = {
    "AllranksError": "allranks.errors",
    "Hints": "allranks.hints",
    "Task": "allranks.task",
    "join": "allranks.training.door",
    "launch": "allranks.surviving.launch",
    "load": "allranks.training.load",
    "verify": "allranks.verifying.own_verify",
}


def __getattr__(name: str) -> object:
    """Import an exported name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'allranks' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The exported names, whether they have been imported or not."""
    return sorted(__all__)
