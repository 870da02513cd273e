"""Which modules of the package only `allranks bench` and the programs under bench/ load: no other test stands on them.

By what is written in the source alone, so more may be counted as loaded than is, never less: imports wherever they
stand, but under TYPE_CHECKING, packages of what is imported, and every dotted name of a module in a text, as commands,
workers and monkeypatch are given it.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

_NAMED = re.compile(r"\ballranks(?:\.\w+)+")
_BENCH = "allranks.cli.bench"
"""How the commands' modules are called that load what measures, each only when it is called."""


def module_name(path: str) -> str:
    """`src/allranks/cli/main.py` -> `allranks.cli.main`."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def named_in(text: str, *, calls: bool = True) -> Iterator[str]:
    """Every module that a source may load, with its packages; without `calls` not what its functions load."""
    ahead: list[ast.AST] = [ast.parse(text)]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                yield from _with_packages(one)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for one in _NAMED.findall(node.value):
                yield from _with_packages(one)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            ahead += node.orelse
        elif calls or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            ahead += ast.iter_child_nodes(node)


def _with_packages(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def reached(ahead: Iterable[str], loads: Callable[[str], Iterable[str]]) -> set[str]:
    """These, and what they load at any distance."""
    seen, left = set[str](), list(ahead)
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += loads(name)
    return seen


class Measuring:
    """The modules that nothing but `allranks bench` and bench/ load.

    Args:
        package: texts of the package's modules, by their names.
        programs: texts of the programs under bench/.
        helpers: texts of what tests import that is no module of tests.
    """

    def __init__(self, package: Mapping[str, str], programs: Iterable[str], helpers: Iterable[str]) -> None:
        whole = {name: [one for one in named_in(text) if one in package] for name, text in package.items()}
        started = {
            name: [one for one in named_in(text, calls=False) if one in package]
            for name, text in package.items()
            if name.startswith(_BENCH)
        }
        self._whole = whole

        def of(texts: Iterable[str]) -> list[str]:
            return [name for text in texts for name in named_in(text) if name in package]

        measured = reached([*started, *of(programs)], whole.__getitem__) - started.keys()
        others = [*(package.keys() - measured), *of(helpers)]
        self.names = measured - reached(others, lambda name: started.get(name, whole[name]))

    @classmethod
    def of_tree(cls, root: Path, names: Iterable[str]) -> "Measuring":
        """Of the files by these names below `root`."""
        python = {name: (root / name).read_text() for name in names if name.endswith(".py")}

        def below(folder: str) -> dict[str, str]:
            return {name: text for name, text in python.items() if name.startswith(folder)}

        package = {module_name(name): text for name, text in below("src/allranks/").items()}
        return cls(package, below("bench/").values(), below("tests/").values())

    def of(self, text: str) -> set[str]:
        """Those that a module of tests loads."""
        return reached({*named_in(text)} & self.names, lambda name: self.names.intersection(self._whole[name]))
