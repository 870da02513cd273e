"""Reads of what a module of another stage of a pipeline would have set on itself, had it been computed here.

A block may leave a loss of its own on itself (`self.aux_loss = ...`), which the model's forward or `loss` sums up.
Where the block belongs to another stage, there is what its `__init__` has left, and the term is missing without a word.
What a forward sets is read from its code: its call on the meta device would miss what it sets in training only, or
behind a look at values. What a block sets and nobody else reads (a cache, a counter) is its own.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, final

from torch import nn

from allranks.parallel.dependence import LIBRARIES, user_place


@final
class AttributeReads:
    """Watches modules of other stages during one forward and, until the next one begins, the loss behind it.

    Args:
        note: is told of each read, in words.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._own: set[int] = set()
        self._watched: list[tuple[nn.Module, type[nn.Module]]] = []

    def begin(self, own: Iterable[nn.Module] = ()) -> None:
        """Watch nothing any more; of what comes, `own` is computed here and never watched, shared or not."""
        for member, kind in self._watched:
            member.__class__ = kind
        self._watched.clear()
        self._own = {id(member) for module in own for member in module.modules()}

    def watch(self, name: str, module: nn.Module) -> None:
        """Note from here on who reads what `module`, whose name is given, or a part of it sets in its forward."""
        for path, member in module.named_modules(prefix=name):
            names = set_in_forward(type(member))
            if names and id(member) not in self._own:
                kind = type(member)
                try:
                    member.__class__ = self._watching(path, kind, names)
                except TypeError:
                    continue  # a class that allows none below it
                self._watched.append((member, kind))
                self._own.add(id(member))

    def _watching(self, path: str, kind: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
        """The same class, whose objects tell of reads from outside."""

        def read(module: nn.Module, attribute: str) -> Any:
            if attribute in names and _is_outside(module):
                where = user_place()
                self._note(
                    f"{path} sets {attribute} in its forward, which {where} reads on another stage, where it is not "
                    "computed: return it from there instead, and pass it on through the blocks"
                )
            return kind.__getattribute__(module, attribute)

        return type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})


def set_in_forward(kind: type[nn.Module]) -> frozenset[str]:
    """The attributes to which the code of a class's forward, and of methods that it uses, assigns; none of torch's."""
    own = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in ("torch", "builtins")]
    found, seen, waiting = set[str](), set[str](), ["forward"]
    while waiting:
        name = waiting.pop()
        if name in seen or name.startswith("__"):
            continue
        seen.add(name)
        for function in (inspect.unwrap(vars(one)[name]) for one in own if name in vars(one)):
            for code in _codes(getattr(function, "__code__", None)):
                found.update(one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
                waiting += code.co_names
    return frozenset(found - {"training"})


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """The code and that of the functions defined in it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)


def _is_outside(module: nn.Module) -> bool:
    """Whether the code that reads is no library's and runs in no forward of the module itself."""
    frame: FrameType | None = sys._getframe(2)
    assert frame is not None
    if any(map(Path(frame.f_code.co_filename).is_relative_to, LIBRARIES)):
        return False
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is module:
            return False
        frame = frame.f_back
    return True
