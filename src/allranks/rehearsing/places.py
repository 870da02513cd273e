"""Whose code runs: the module that a forward is in, the one whose backward runs, and the line that asked."""

import bisect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

PACKAGE = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)
ENGINE = tuple(
    f"{PACKAGE}/{room}" for room in ("parallel/", "stepping/", "data/", "rehearsing/", "profiling/", "vocabulary.py")
)
WHO_SKIP = ("/stepping/optimizer.py", "/stepping/ema.py")
"""Their `update` reads whether the step is left out."""
PUT_BACK = ("buffers_kept", "put_back")
"""Of stepping, what gives buffers their values again: after a pass that does not count, or a step that is left out."""
REHEARSING = f"{PACKAGE}/rehearsing/"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
RECORD = f"{PACKAGE}/parallel/step_record.py", f"{PACKAGE}/parallel/seen_collectives.py"
"""Look on, as the rehearsal does, and ask for nothing."""
LOSS = "loss"
"""The place of what runs in a forward outside of all modules: the Task's loss."""
UPDATE = "the update"
"""The place of what runs behind the last backward."""


def starred(name: str) -> str:
    """`layers.3.mlp` -> `layers.*.mlp`: equal parts have one name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


@final
class Places:
    """Follows the forwards of some modules, and knows in a backward whose operation it undoes.

    Args:
        modules: the user's, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = {
            id(member): name for which, module in modules.items() for name, member in module.named_modules(prefix=which)
        }
        self._roots = {id(module): which for which, module in modules.items()}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._owners: list[str] = []
        self._lines: dict[str, str] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, forwards are followed."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    @property
    def running(self) -> str:
        """The module that runs, or whose backward does; `LOSS` outside of all, "" where it is no single one's."""
        if torch._C._current_graph_task_id() == -1:
            return self._stack[-1] if self._stack else LOSS
        node: Any = torch._C._current_autograd_node()
        if node is None or not self._starts or self.accumulating:
            return ""
        place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[place] if place >= 0 else ""

    @property
    def accumulating(self) -> bool:
        """Whether a gradient is put where it stays, which undoes no operation of a forward."""
        node = torch._C._current_autograd_node()
        return isinstance(node, torch._C._functions.AccumulateGrad)  # type: ignore[attr-defined]

    @property
    def accumulates_parameter(self) -> bool:
        """Whether that is a parameter's, and not of what a stage of a pipeline has received."""
        node: Any = torch._C._current_autograd_node()
        return self.accumulating and isinstance(node.variable, nn.Parameter)

    def called_by(self, name: str) -> str:
        """The user's line that called a module in the last forward, `task.py:12 forward`; "" where none of it is."""
        return self._lines.get(name, "")

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if id(module) in self._roots:
            self._stack.clear()  # a pipeline leaves forwards in their middle
        name = self._names.get(id(module))
        if name is not None and (line := _users_line()):  # a forward that is repeated in a backward has none
            self._lines[name] = line
        self._stack.append(name if name is not None else self._stack[-1] if self._stack else "")
        self._note()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        """From this number on the nodes of the graph belong to the module that runs now."""
        number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        owner = self._stack[-1] if self._stack else LOSS
        if self._starts and number < self._starts[-1]:
            self._starts.clear()
            self._owners.clear()
        if self._starts and self._starts[-1] == number:
            self._owners[-1] = owner
        else:
            self._starts.append(number)
            self._owners.append(owner)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _users_line() -> str:
    """The user's line that led here, where it is one."""
    line = line_that_asked()
    return line if is_users(line) else ""


def is_users(line: str) -> bool:
    """Whether a line that asked is the user's own, or one of a model; none at all is not."""
    return bool(line) and (line.startswith("allranks/models/") or not line.startswith("allranks/"))


def waits_for_peer() -> bool:
    """Whether a send or receive is dispatched for `dist.send` or `dist.recv`, which return when both ends have come."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith((TORCH, "<", *RECORD, REHEARSING)):
            return False
        if frame.f_code.co_name in ("send", "recv") and frame.f_code.co_filename == C10D:
            return True
    return False


def line_that_asked() -> str:
    """The user's line that led here, else ours: `task.py:12 forward`."""
    ours = ""
    for frame in _frames():
        code = frame.f_code
        if code.co_filename.startswith((TORCH, "<", *RECORD, REHEARSING)):
            continue
        if not code.co_filename.startswith(PACKAGE) or code.co_filename.startswith(f"{PACKAGE}/models/"):
            if not _is_outer(code):
                return f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"
            break
        if not ours:
            ours = f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        if code.co_filename.startswith(f"{PACKAGE}/stepping/"):
            break  # what called the step is nobody's cause
    return ours


def answer_to_engine() -> float | None:
    """What stands for a value that the engine reads; None where the innermost line outside of torch is the user's.

    0 is what says that a step counts, 1 is any other.
    """
    by_optimizer = False  # torch's, which reads its own numbers
    for frame in _frames():
        name = frame.f_code.co_filename
        if name.startswith((TORCH, "<", *RECORD, f"{PACKAGE}/rehearsing/w")):
            by_optimizer = by_optimizer or name.startswith(f"{TORCH}/optim/")
            continue
        if not name.startswith(ENGINE) or name.endswith("/rehearsing/named.py"):
            return None
        whether_skipped = frame.f_code.co_name == "update" and name.endswith(WHO_SKIP) and not by_optimizer
        return 0.0 if whether_skipped else 1.0
    return None


def puts_back() -> bool:
    """Whether the engine is about to give buffers the values again that they had."""
    inner = next((f.f_code for f in _frames() if not f.f_code.co_filename.startswith((TORCH, "<", REHEARSING))), None)
    return inner is not None and inner.co_name in PUT_BACK and inner.co_filename.startswith(f"{PACKAGE}/stepping/")


def _is_outer(code: CodeType) -> bool:
    return code.co_name in ("<module>", "main")


def _short(path: str) -> str:
    return path.removeprefix(str(Path(PACKAGE).parent) + "/") if path.startswith(PACKAGE) else Path(path).name
