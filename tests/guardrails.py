"""The checks behind test_guardrails.py, as functions from a source folder to a list of complaints.

Each takes the package folder (`src/allranks`) and reads its files with `ast`; nothing is imported. test_guardrails.py
applies them to the real tree and to a bad sample that every one of them has to see.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "allranks"
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

# A room is a package or a single file below src/allranks. The files of floors 0 and 1 may import their neighbours.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "errors units durable home_directory lifeline standard_streams config config_guard config_keys config_layers "
        "config_sections config_toml layout_string layout_placement even_cut kept_products left_out journal_events "
        "ordinary_file printable raised seeds",
        "layout layout_refusals slow_links cluster model_profile model_shape shape_operations named_models "
        "attention_windows hugging_face_config hugging_face_keys hugging_face_windows "
        "parameter_map plan upkeep plan_request rehearsal rehearsed_messages simulation "
        "simulation_request verdict hints own_loops task task_loading task_world users_code run lease request "
        "hosts_request losses vocabulary "
        "failure process_end recorded process_environment free_memory digest fence fault_points",
        "planning profiling parallel data checkpointing observing launching reporting models",
        "stepping",
        "training rehearsing surviving benchmarking",
        "verifying",
        "cli",
    )
)
FIRST_FLOOR_OF_PACKAGES = 2
DOORS = (PACKAGE, f"{PACKAGE}.__main__")  # they only open onto other floors

# Thinking needs no torch (style.md, principle 5). Everything of a room, or a single module.
TORCH_FREE = (
    *sorted(FLOORS[0] | FLOORS[1] - {"task", "task_loading", "task_world", "users_code", "losses", "vocabulary"}),
    *("planning", "launching", "reporting", "cli", "checkpointing.checkpoint", "observing.journal"),
)

DRAWERS = frozenset(
    ("util", "utils", "common", "helper", "helpers", "misc", "core", "base", "shared", "lib", "managers")
)
WALKERS = frozenset(("named_parameters", "named_buffers"))
# Who wraps may unwrap; a reference model sets its own initial values; the reference loop knows nothing of ours, and
# what a user's own loop has built has no ParameterMap.
MAY_WALK = ("parallel/", "models/", "verifying/reference", "verifying/observation")
UNPICKLERS = frozenset(
    ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch", "jsonpickle")
)
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
OBJECT_COLLECTIVES = ("_object", "_object_list")  # torch.distributed's collectives that pickle


@dataclass(frozen=True)
class Module:
    """One source file: its path below the package and its dotted name."""

    root: Path
    path: Path

    @property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return parse(self.path.read_text(), str(self.path))

    @property
    def name(self) -> str:
        """`allranks.data.cut`; a package's `__init__.py` has the package's name."""
        parts = [PACKAGE, *self.path.relative_to(self.root).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def relative(self) -> str:
        """`data/cut.py`."""
        return self.path.relative_to(self.root).as_posix()

    def at(self, node: ast.AST) -> str:
        """`data/cut.py:12`."""
        return f"{self.relative}:{getattr(node, 'lineno', 1)}"


@cache
def parse(text: str, name: str) -> ast.Module:
    """The same tree for every check that reads the file, since none changes it."""
    return ast.parse(text, name)


def modules(root: Path) -> list[Module]:
    """Every source file of the package, sorted."""
    return [Module(root, path) for path in sorted(root.rglob("*.py")) if "__pycache__" not in path.parts]


def room(module_name: str) -> str:
    """`allranks.data.cut` -> `data`; the front door itself -> ``."""
    return module_name.split(".")[1] if "." in module_name else ""


def floor(room_name: str) -> int | None:
    """The floor of a room, or None where the table does not know it."""
    return next((number for number, rooms in enumerate(FLOORS) if room_name in rooms), None)


def own_imports(module: Module, known: Mapping[str, Module]) -> Iterator[tuple[str, ast.AST]]:
    """(what of our package is imported, where), wherever in the file it stands; also `import_module("allranks...")`."""
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names if is_own(alias.name))
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*above, *filter(None, [node.module])])
            if is_own(origin):
                for alias in node.names:
                    full = f"{origin}.{alias.name}"
                    yield (full if full in known or origin == PACKAGE else origin), node
        elif isinstance(node, ast.Call) and called_name(node.func) == "import_module" and node.args:
            name = getattr(node.args[0], "value", None)
            yield from ((own, node) for own in [name] if isinstance(own, str) and is_own(own))


def is_own(name: str) -> bool:
    """Whether a dotted name is of our package."""
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def called_name(function: ast.expr) -> str:
    """The last word of what is called: `f` and `a.b.f` -> `f`."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def check_floors(root: Path) -> list[str]:
    """Imports point down; packages on one floor never import each other; nobody inside comes through the front door."""
    known = {module.name: module for module in modules(root)}
    complaints = []
    for module in known.values():
        if module.name in DOORS:
            continue
        if (own := floor(room(module.name))) is None:
            complaints.append(
                f"{module.relative}: room {room(module.name)!r} has no floor; add it to FLOORS in tests/guardrails.py"
            )
            continue
        for name, node in own_imports(module, known):
            if floor(room(name)) is None and name in known and name != PACKAGE:
                continue  # its own file is complained about
            if problem := import_problem(room(module.name), own, name):
                complaints.append(f"{module.at(node)}: {problem}")
    return complaints


def import_problem(here: str, own: int, name: str) -> str | None:
    """What is wrong with importing `name` from room `here` on floor `own`, if anything is."""
    there = room(name)
    if there in ("", "__version__"):
        advice = f"import the module that holds the name, or `from {PACKAGE} import __version__`"
        return None if there else f"imports {PACKAGE} itself: {advice}"
    other = floor(there)
    if other is None:
        return f"imports {name} through the front door: import the module that holds the name"
    if other > own:
        return f"{here} (floor {own}) imports {name} (floor {other}): imports point down"
    if other == own and there != here and own >= FIRST_FLOOR_OF_PACKAGES:
        return f"{here} imports {name}: packages of floor {own} do not know each other"
    return None


def check_circles(root: Path) -> list[str]:
    """No module imports itself, over however many others (imports inside functions count)."""
    known = {module.name: module for module in modules(root)}
    edges = {
        name: {other for other, _ in own_imports(module, known)} & known.keys()
        for name, module in known.items()
        if name != PACKAGE
    }
    complaints = []
    while leaves := {name for name, others in edges.items() if not others & edges.keys()}:
        for name in leaves:
            del edges[name]
    for name in sorted(edges):
        circle = {other for other in reachable(name, edges) if name in reachable(other, edges)}
        if circle:
            complaints.append(f"{known[name].relative}: in an import circle with {', '.join(sorted(circle - {name}))}")
    return complaints


def reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """What `start` imports, over any number of others."""
    found: set[str] = set()
    todo = [start]
    while todo:
        new = edges.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def check_sizes(root: Path) -> list[str]:
    """Files of at most 300 lines, functions of at most 60 (decorators aside, docstring included)."""
    complaints = []
    for module in modules(root):
        lines = len(module.path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            complaints.append(f"{module.relative}: {lines} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    complaints.append(
                        f"{module.at(node)}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
                    )
    return complaints


def check_names(root: Path) -> list[str]:
    """No drawers: a function without a home means that a noun is missing."""
    paths = [path for path in sorted(root.rglob("*")) if "__pycache__" not in path.parts]
    named = [path for path in paths if path.is_dir() or path.suffix == ".py"]
    return [f"{path.relative_to(root)}: a drawer, not a noun" for path in named if path.stem.lower() in DRAWERS]


def check_mirror(root: Path, tests: Path, exceptions: Mapping[str, str]) -> list[str]:
    """Every module has a test file of its name at its place, or an exception (path -> reason) that is needed."""
    complaints = []
    for module in modules(root):
        relative = Path(module.relative)
        mirror = tests / relative.parent / f"test_{relative.name}"
        if relative.name != "__init__.py" and mirror.exists() == (module.relative in exceptions):
            what = (
                "has a test file and needs no exception"
                if mirror.exists()
                else f"no {mirror.relative_to(tests.parent)}"
            )
            complaints.append(f"{module.relative}: {what}")
    gone = [path for path in exceptions if not (root / path).exists()]
    return complaints + [f"{path}: an exception for a file that is not there" for path in gone]


def check_walkers(root: Path) -> list[str]:
    """Nobody peels wrappers twice: who a parameter is, the ParameterMap says."""
    return [
        f"{module.at(node)}: {node.attr}: take a ParameterMap as an argument"
        for module in modules(root)
        if not module.relative.startswith(MAY_WALK)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in WALKERS
    ]


FORMULAS = (
    *("axis_traffic", "bills", "block_cost", "block_parts", "collectives", "compute", "constants", "data_traffic"),
    *("estimate", "host_parameters", "host_traffic", "least", "memory", "moments", "operation_times", "pipeline"),
    *("pipeline_traffic", "processor", "processor_tensor", "processor_traffic", "repeats", "room", "setting", "stages"),
    *("uncertainty", "upkeep_cost"),
)
"""Modules of planning that calculate; the others choose, check, read and tell."""
CALCULATES = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)
IN_EARNEST = 3
FORMULA = re.compile(r"(_seconds|_bytes|_cost|_times|_traffic|bubble|_use)$|^(bill_of|spread_of|share_of)$")
SOURCE = re.compile(
    r"\d{4}\.\d{4,5}|\b(19|20)\d\d\b|NVIDIA|nccl|NCCL|torch/|FSDP2|JCGM|\w+/\w+\.py|docs/|measured|[Aa]rithmetic"
    r"|assumption"
)


def check_sources(root: Path) -> list[str]:
    """A formula of planning says where it is from: a paper, a document, a program, arithmetic, or that it was measured.

    A formula is what is named like one, private or not; and in the modules of FORMULAS every function that calculates
    in earnest, wherever it stands.
    """
    return [
        f"{module.at(node)}: {node.name}: its docstring names no source"
        for module in modules(root)
        if module.relative.startswith("planning/")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and is_formula(module, node)
        if not SOURCE.search(ast.get_docstring(node) or "")
    ]


def is_formula(module: Module, node: ast.FunctionDef) -> bool:
    """By the name of a function of the module, or by how often it adds, subtracts, multiplies and divides."""
    bare = node.name.removeprefix("_")
    if node in module.tree.body and not bare.startswith("check_") and FORMULA.search(bare):
        return True
    if module.name.rpartition(".")[2] not in FORMULAS or node.name.startswith("__"):
        return False
    steps = (one for one in of_its_own(node) if isinstance(one, ast.BinOp | ast.AugAssign))
    return sum(isinstance(one.op, CALCULATES) for one in steps) >= IN_EARNEST


def of_its_own(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside, but for what functions in it do."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from of_its_own(child)


def check_unpickling(root: Path, allowed: Mapping[str, str]) -> list[str]:
    """Nothing on disk or in a store is ever unpickled; `allowed` is `path: call` -> reason, for one's own pipe."""
    complaints, used = [], set()
    for module in modules(root):
        for node in ast.walk(module.tree):
            if call := unpickling(node):
                used.add(f"{module.relative}: {call}")
                if f"{module.relative}: {call}" not in allowed:
                    complaints.append(f"{module.at(node)}: {call} unpickles")
    return complaints + [f"{entry}: allowed, and not there" for entry in allowed if entry not in used]


def unpickling(node: ast.AST) -> str | None:
    """The name of what unpickles at this node, if something does."""
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner in UNPICKLERS and node.attr in ("load", "loads", "Unpickler"):
            return f"{owner}.{node.attr}"
        return node.attr if node.attr.endswith(OBJECT_COLLECTIVES) else None
    if isinstance(node, ast.ImportFrom) and node.module in UNPICKLERS:
        taken = [alias.name for alias in node.names if alias.name in ("load", "loads", "Unpickler", "open")]
        return f"{node.module}.{taken[0]}" if taken else None
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return None if isinstance(node.value, ast.Constant) and node.value.value is False else "allow_pickle"
    return None


def check_docstrings(root: Path) -> list[str]:
    """Every public module, class, function and method says its contract, or a base class does; `forward` need not."""
    classes = {
        node.name: node for module in modules(root) for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)
    }
    complaints = []
    for module in modules(root):
        if ast.get_docstring(module.tree) is None:
            complaints.append(f"{module.relative}: no docstring")
        for name, node in public_definitions(top_level(module.tree)):
            if ast.get_docstring(node) is None and not is_documented_elsewhere(name, node, classes):
                complaints.append(f"{module.at(node)}: {name} has no docstring")
    return complaints


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """(`Class.method`, node) for all public classes, functions and methods of a body."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def top_level(tree: ast.Module) -> list[ast.stmt]:
    """A module's statements, with those under `if` and `try`."""
    found: list[ast.stmt] = []
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop(0)
        found.append(node)
        if isinstance(node, ast.If | ast.Try):
            todo += [*node.body, *node.orelse]
    return found


def is_documented_elsewhere(name: str, node: Definition, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Whether this is `forward`, an overload, a property's setter, or a method documented in a base class."""
    if node.name == "forward" or any(
        called_name(d) in ("overload", "override", "setter", "deleter") for d in node.decorator_list
    ):
        return True
    owner = classes.get(name.split(".")[-2]) if "." in name else None
    return owner is not None and any(documents(base, node.name, classes) for base in owner.bases)


def documents(base: ast.expr, method: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Whether a base class of ours, or one of its own, has a docstring on `method`."""
    owner = classes.get(called_name(base.value if isinstance(base, ast.Subscript) else base))
    if owner is None:
        return False
    own = any(isinstance(n, ast.FunctionDef) and n.name == method and ast.get_docstring(n) for n in owner.body)
    return own or any(documents(other, method, classes) for other in owner.bases)


def check_marks(tests: Path) -> list[str]:
    """Nothing is `full` as a whole and in part: then its short cases, which `sample` or a case's mark is for, are gone.

    What is marked as a whole is a function, its class, or its module by `pytestmark`; in part, by `sample` or by a case
    that is marked `full`, in the decorator itself or in a list of the module that it names.
    """
    complaints = []
    for path in sorted(tests.rglob("test_*.py")):
        if "full" not in (text := path.read_text()):
            continue
        tree = parse(text, str(path))
        lists = {name: value for node in tree.body for name, value in assigned(node).items()}
        whole = "pytestmark" in lists and is_marked(lists["pytestmark"], "full")
        for node, within in marked_definitions(tree.body, whole):
            decorators = ast.Tuple(list(node.decorator_list))
            cases = [case for call in ast.walk(decorators) if isinstance(call, ast.Call) for case in call.args]
            named = [lists[n.id] for case in cases for n in ast.walk(case) if isinstance(n, ast.Name) and n.id in lists]
            in_part = ["sample"] if is_marked(decorators, "sample") else []
            in_part += ["full in a case"] if any(is_marked(case, "full") for case in (*cases, *named)) else []
            if within and in_part:
                place = f"{path.relative_to(tests).as_posix()}:{node.lineno}"
                complaints.append(f"{place}: {node.name} is full as a whole, and {' and '.join(in_part)}")
    return complaints


def assigned(node: ast.stmt) -> dict[str, ast.expr]:
    """Name -> value, of `a = value` and of `a: kind = value`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return {target.id: value for target in targets if isinstance(target, ast.Name) and value is not None}


def marked_definitions(body: list[ast.stmt], whole: bool) -> Iterator[tuple[Definition, bool]]:
    """Every function and class, with whether it is marked `full` as a whole, by itself or by what it stands in."""
    for node in body:
        if isinstance(node, Definition):
            own = whole or any(ast.unparse(decorator) == "pytest.mark.full" for decorator in node.decorator_list)
            yield node, own
            if isinstance(node, ast.ClassDef):
                yield from marked_definitions(node.body, own)


def is_marked(node: ast.AST, word: str) -> bool:
    """Whether `pytest.mark.<word>` stands somewhere in it."""
    return any(isinstance(n, ast.Attribute) and ast.unparse(n) == f"pytest.mark.{word}" for n in ast.walk(node))
