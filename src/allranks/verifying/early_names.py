"""Names that a program has given to functions of torch before these are replaced: `from torch import randn`, say.

What replaces a function in torch's module does not reach a module that has it under a name of its own. Seen are names
of modules; a function that is kept in an object (a partial, an attribute) stays torch's own.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NOT_THE_PROGRAM = ("torch", "allranks")  # these know what they mean


@contextmanager
def renaming(replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Inside, every module of the program has, for the functions that are keys, those that are values."""
    found = [
        (names, name, function, replaced[function])
        for names in _program_modules(replaced)
        for name, function in names.items()
        if any(function is one for one in replaced)
    ]
    for names, name, _, other in found:
        names[name] = other
    try:
        yield
    finally:
        for names, name, function, other in found:
            if names.get(name) is other:
                names[name] = function


def _program_modules(functions: Mapping[Callable[..., Any], Any]) -> list[dict[str, Any]]:
    """The globals of modules of the program that have a name for one of the functions."""
    # By who refers to it: a Task's module need not be in sys.modules.
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # what a fork server has frozen (surviving/preload.py), the user's modules among it, is not searched
    holders = [one for one in gc.get_referrers(*functions) if type(one) is dict]
    if frozen:
        gc.freeze()
    return [one for one in holders if "__builtins__" in one and not _is_known(str(one.get("__name__")))]


def _is_known(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in NOT_THE_PROGRAM
