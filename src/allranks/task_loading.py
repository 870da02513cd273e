"""From a spec like "file.py:Name" to the user's class, with every mistake on the way told in the user's own lines.

A user's file becomes an ordinary module: under its own name where that name leads back to it (so its siblings may
import it), else under `allranks.task_loading.<name>_<path in hex>`, which any process can import again because the name
says where the file is. Both survive pickling into the worker processes of a DataLoader, forked or spawned.
"""

import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from allranks.errors import TaskError
from allranks.home_directory import expand
from allranks.users_code import is_installed, user_line

__path__: list[str] = []  # makes this module the parent package of the files that cannot keep their own name


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Where a Task is: `file.py`, `file.py:Name`, `package.module` or `package.module:Name`.

    Attributes:
        file: the absolute path of the user's file, or None for a module.
        module: the dotted name of a module, or "" for a file.
        name: the class, or None for the only one there.
    """

    file: Path | None
    module: str
    name: str | None

    @staticmethod
    def parse(text: str, folder: Path | None = None) -> "TaskSpec":
        """Read a spec; a file is relative to `folder` (default: the current one). TaskError for any other form."""
        place, _, name = text.rpartition(":") if ":" in text else (text, "", "")
        forms = "expected file.py, file.py:Name or package.module:Name"
        if (":" in text and not name.isidentifier()) or not place:
            raise TaskError(f"{text!r} names no Task: {forms}")
        if place.endswith(".py"):
            return TaskSpec(((folder or Path.cwd()) / expand(place)).resolve(), "", name or None)
        if not all(part.isidentifier() for part in place.split(".")):
            raise TaskError(f"{text!r} names no Task: {forms}")
        return TaskSpec(None, place, name or None)

    def __str__(self) -> str:
        """The spec with the file's absolute path, so that it means the same from any folder."""
        place = str(self.file) if self.file is not None else self.module
        return place if self.name is None else f"{place}:{self.name}"


def load_class(spec: TaskSpec, base: type) -> type:
    """The subclass of `base` that `spec` names.

    Raises:
        TaskError: no such file or module; it does not import (the user's line is shown); no such class, or several.
    """
    return _choose(load_module(spec), spec, base)


def load_module(spec: TaskSpec) -> ModuleType:
    """Import the file or module of `spec` once; its folder stays on `sys.path`."""
    if spec.file is None:
        _add_to_path(Path.cwd())
        return _import(spec.module, spec.module)
    _check_file(spec.file)
    _add_to_path(spec.file.parent)
    return _import(_module_name(spec.file), spec.file.name)


def _add_to_path(folder: Path) -> None:
    if str(folder) in sys.path:
        return
    # behind the standard library (a user's random.py must not become everyone's random), before the installed packages
    installed = [place for place, entry in enumerate(sys.path) if is_installed(entry)]
    sys.path.insert(min(installed, default=len(sys.path)), str(folder))
    importlib.invalidate_caches()


def _check_file(file: Path) -> None:
    if file.is_file():
        return
    if file.is_dir():
        raise TaskError(f"{file} is a folder, not a Python file")
    near = difflib.get_close_matches(file.name, [path.name for path in sorted(file.parent.glob("*.py"))], n=1)
    where = f"{file.parent} has no {file.name}" if file.parent.is_dir() else f"no folder {file.parent}"
    advice = f"did you mean {near[0]}?" if near else "`allranks new task.py` writes one"
    raise TaskError(f"no Task file: {where}; {advice}")


def _module_name(file: Path) -> str:
    name = file.stem
    if name.isidentifier():
        found = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        if found is not None and found.origin is not None and Path(found.origin).resolve() == file:
            return name
    word = "".join(letter if letter.isalnum() else "_" for letter in name)
    return f"{__name__}.{word}_{os.fsencode(file).hex()}"


class _EncodedFiles(importlib.abc.MetaPathFinder):
    """Finds the files whose path stands in hex at the end of their module name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of an encoded file, or None for every other module."""
        parent, _, encoded = fullname.rpartition(".")
        if parent != __name__:
            return None
        try:
            file = os.fsdecode(bytes.fromhex(encoded.rpartition("_")[2]))
        except ValueError:
            return None
        return importlib.util.spec_from_file_location(fullname, file)


sys.meta_path.append(_EncodedFiles())


def _import(name: str, shown: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        lines = "".join(traceback.format_exception_only(error)).rstrip()
        raise TaskError(f"{shown} does not parse:\n{lines}") from error
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise TaskError(f"no module {name!r} (its folder must be the current one, or on PYTHONPATH)") from error
        raise TaskError(f"{shown} cannot be imported:\n{user_line(error)}") from error


def describe(value: Any, depth: int = 2) -> str:
    """A batch in words: types, names and shapes, never values of tensors."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # this module imports no torch
        return f"a {str(value.dtype).removeprefix('torch.')} {type(value).__name__.lower()} {list(value.shape)}"
    if isinstance(value, Mapping) and depth:
        return "{" + ", ".join(f"{name}: {describe(part, depth - 1)}" for name, part in list(value.items())[:8]) + "}"
    if isinstance(value, tuple | list) and depth:
        kind = type(value).__name__
        return f"a {kind} of {len(value)} ({', '.join(describe(part, depth - 1) for part in value[:3])})"
    return repr(value) if isinstance(value, int | float | bool | str | None) else f"a {type(value).__name__}"


def _choose(module: ModuleType, spec: TaskSpec, base: type) -> type:
    where = spec.file.name if spec.file is not None else spec.module
    found = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, base) and value is not base
    }
    own = {value.__name__: value for value in found.values() if value.__module__ == module.__name__}
    if spec.name is not None:
        if spec.name in found:
            return found[spec.name]
        raise TaskError(_refused_name(module, spec.name, where, list(found)))
    candidates = own or found
    whole = {name: value for name, value in candidates.items() if not missing_methods(value, base)}
    candidates = whole or candidates  # a base class without model() is no choice beside its subclass
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    if candidates:
        example = f"{where}:{next(iter(candidates))}"
        raise TaskError(f"{where} has several Tasks ({', '.join(candidates)}): name one, as in {example}")
    raise TaskError(
        f"{where} has no Task: write `class MyTask(allranks.Task)` in it; `allranks new task.py` starts one. A loop of "
        f"your own is started by torchrun or python, as in `torchrun --nproc-per-node N {where}` "
        "(docs: how-to/own-loop.md)"
    )


def _refused_name(module: ModuleType, name: str, where: str, found: list[str]) -> str:
    if name in vars(module):
        value = vars(module)[name]
        kind = f"a class of {value.__bases__[0].__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
        return f"{name} in {where} is {kind}, not a subclass of allranks.Task"
    near = difflib.get_close_matches(name, found, n=1)
    ends = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(found)}" if found else "; it has no Task"
    return f"{where} has no Task {name}{ends}"


def missing_methods(task_class: type, base: type) -> list[str]:
    """The required methods of a Task that the class leaves out: model, dataset, and one of loss and step."""

    def left_out(name: str) -> bool:
        return getattr(task_class, name) is getattr(base, name)

    missing = [name for name in ("model", "dataset") if left_out(name)]
    return missing + (["loss"] if left_out("loss") and left_out("step") else [])


def setting_types(task_class: type, base: type) -> dict[str, Any]:
    """The settings of a Task class: its public annotations but ClassVars, name -> type, in order of definition."""
    try:
        hints = typing.get_type_hints(task_class, include_extras=True)
    except Exception as error:
        raise TaskError(f"the annotations of {task_class.__name__} cannot be read: {error}") from error
    inherited = typing.get_type_hints(base, include_extras=True)
    names = [name for part in reversed(task_class.__mro__) for name in inspect.get_annotations(part)]
    return {name: hints[name] for name in names if name not in inherited and _is_setting(name, hints[name])}


def _is_setting(name: str, annotation: Any) -> bool:
    return not name.startswith("_") and typing.ClassVar not in (annotation, typing.get_origin(annotation))


def check_settings(task_class: type, types: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, Any]:
    """The given settings in the types of their annotations; text from a command line is converted ("256" -> 256).

    Raises:
        TaskError: an unknown setting (the nearest is named), a value of another type, or a setting without any value.
    """
    for name in settings:
        if name not in types:
            raise TaskError(_unknown_setting(task_class, name, list(types)))
    unset = [name for name in types if name not in settings and name not in _class_values(task_class)]
    if unset:
        advice = f"give task.{unset[0]}=..., or a default in the class"
        raise TaskError(f"{task_class.__name__} needs a value for {unset[0]}: {advice}")
    return {name: _convert(task_class, name, types[name], value) for name, value in settings.items()}


def _unknown_setting(task_class: type, name: str, known: list[str]) -> str:
    text = f"{task_class.__name__} has no setting {name!r}"
    if name in _class_values(task_class) and not callable(_class_values(task_class)[name]):
        return f"{text}: annotate the attribute to make it one, as in `{name}: int = ...`"
    near = difflib.get_close_matches(name, known, n=1)
    return text + (f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known) or 'none'}")


def _class_values(task_class: type) -> dict[str, object]:
    return {name: value for part in reversed(task_class.__mro__) for name, value in vars(part).items()}


def setting_adapter(task_class: type, name: str, annotation: Any) -> TypeAdapter[Any]:
    """Pydantic's converter for one setting; TaskError for an annotation that no value in a file can have."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(coerce_numbers_to_str=True))
    except PydanticUserError:
        pass
    try:
        return TypeAdapter(annotation)
    except PydanticUserError as error:
        advice = "a setting is a number, text, truth value or list of them; name any other attribute with a leading _"
        raise TaskError(f"{name}: {_shown(annotation)} in {task_class.__name__} can be no setting: {advice}") from error


def _convert(task_class: type, name: str, annotation: Any, value: object) -> Any:
    adapter = setting_adapter(task_class, name, annotation)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        try:
            if isinstance(value, str):
                return adapter.validate_json(value)  # "[1, 2]" for a list
        except ValidationError:
            pass
        reason = error.errors()[0]["msg"]
        setting = f"{name}: {_shown(annotation)} of {task_class.__name__}"
        raise TaskError(f"task.{name}={value!r} does not fit {setting}: {reason}") from error


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
