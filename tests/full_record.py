"""`pytest --full --part i/n`: the long tests too, split over n runs, with a record in `.full/` to resume from.

A test is in part crc32(node id) % n + 1, whatever other tests there are. The record names the commit and, for every
test, a digest of what it stands on: the whole tree but for the test modules that it does not import, for modules that
`allranks bench` alone loads where it does not (tests/loaded.py), and for pages, stored results, the programs that write
them, and comments and docstrings of what it imports where it names none. A test that passed on this very digest, in
whichever part, is not run again: after a repair in one test module only that module is, after a word in a page only
what reads pages.

`.full/` belongs to one checkout. `python -m tools.full_results` keeps what passed in bench/results/full.json, for the
pages that tell of it and for a run that goes on in another checkout.
"""

import ast
import hashlib
import json
import re
import subprocess
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.loaded import Measuring, module_name


def parse_part(text: str) -> tuple[int, int]:
    """`2/4` -> (2, 4). Raises pytest.UsageError for anything that is no part of a whole."""
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--part {text}: give i/n with 1 <= i <= n, e.g. --part 2/4")
    return int(part), int(count)


def part_of(node_id: str, count: int) -> int:
    """Which of `count` parts (from 1) a test belongs to."""
    return zlib.crc32(node_id.encode()) % count + 1


def git(root: Path, *arguments: str) -> str | None:
    """What git answers, or None where it cannot."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def digest(files: Mapping[str, str]) -> str:
    """One digest of names and the digests of their contents."""
    return hashlib.sha256("".join(f"{name}\0{files[name]}\0" for name in sorted(files)).encode()).hexdigest()


NAMES_PAGES = re.compile(
    r"\bdocs/|['\"]docs['\"]|[\w*]\.md\b|\bbench\b|/ ['\"]results['\"]|\btools\b|README|CHANGELOG"
    r"|['\"]src['\"]|\bsrc/|__doc__"
)
"""What is in the text of a test module that reads pages, stored results or sources, or runs what writes them."""


KEPT = "bench/results/full.json"
"""What passed, as it is kept with the source; nothing stands on it, else no record could hold for its own tree."""


TOLD = "docs/reference/faults.md"
"""The page that is made of it, on which nothing stands either: tests/test_generated.py holds it to that."""


RECORDER = ("tests/full_record.py", "tests/loaded.py")
"""What tells what ran, and has a part in no test but its own."""


def is_page(name: str) -> bool:
    """Whether a path is documentation, the stored result of a measurement, or a program that writes one of them."""
    beside = "/" not in name and name.endswith(".md")
    return beside or name in RECORDER or name.startswith(("docs/", "bench/", "tools/"))


def is_test_module(name: str) -> bool:
    """Whether a path of the tree is a module of tests."""
    return Path(name).name.startswith("test_") and name.endswith(".py")


def is_code(name: str) -> bool:
    """Whether a path is a module that counts by what it does alone.

    The docstrings of cli/ are what the command prints, and of programs that tests run lines are told by number.
    """
    read = "src/allranks/cli/", "tests/programs/"
    return name.startswith(("src/", "tests/")) and name.endswith(".py") and not name.startswith(read)


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_of(text: str) -> str:
    """A module without its comments, its layout and what stands in it as words alone."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            node.body = [line for line in node.body if not _is_words(line)] or [ast.Pass()]
    return ast.dump(tree)


def _is_words(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


class Tree:
    """Every file that git tracks or would track, with a digest of its contents; none outside a git work tree."""

    def __init__(self, root: Path) -> None:
        self._root = root
        listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
        names = [name for name in listed.split("\0") if name not in ("", KEPT, TOLD) and (root / name).is_file()]
        files = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}
        self._tests = {name: file for name, file in files.items() if is_test_module(name)}
        source = {name: file for name, file in files.items() if name not in self._tests}
        self._pages = digest(source)
        does = {name: self._does(name, file) for name, file in source.items() if not is_page(name)}
        self.measuring = Measuring.of_tree(root, (name for name in source if name not in RECORDER))
        measures = {name: module_name(name) for name in does if module_name(name) in self.measuring.names}
        self._measures = {module: does[name] for name, module in measures.items()}
        self._common = digest({name: file for name, file in does.items() if name not in measures})
        self._known: dict[str, str | None] = {}

    def _does(self, name: str, file: str) -> str:
        if not is_code(name):
            return file
        return hashlib.sha256(code_of((self._root / name).read_text()).encode()).hexdigest()

    def stands_on(self, node_id: str) -> str | None:
        """The digest of all that a test's result may depend on; None outside a git work tree."""
        module = node_id.partition("::")[0]
        if module not in self._known:
            seen = self._imported(module)
            files = {name: self._tests[name] for name in seen} | {"": self._common}
            texts = [(self._root / name).read_text() for name in seen]
            files |= {name: self._measures[name] for text in texts for name in self.measuring.of(text)}
            if any(map(NAMES_PAGES.search, texts)):
                files["docs"] = self._pages
            self._known[module] = digest(files) if seen else None
        return self._known[module]

    def _imported(self, module: str) -> set[str]:
        """A test module and the test modules that it imports, at any distance."""
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            name = ahead.pop()
            if name in seen or name not in self._tests:
                continue
            seen.add(name)
            for node in ast.walk(ast.parse((self._root / name).read_text())):
                if isinstance(node, ast.ImportFrom):
                    ahead += [f"{'/'.join((node.module or '').split('.'))}.py"]
        return seen


Results = Mapping[str, Mapping[str, Any]]
"""Node id -> outcome, seconds, what was measured, the digest of what it stands on, the commit."""


def kept_results(root: Path) -> Results:
    """What is kept with the source: by module, since all tests of one stand on the same."""
    path = root / KEPT
    modules = json.loads(path.read_text()) if path.exists() else {}
    return {
        f"{module}::{name}": {
            "outcome": "passed",
            "seconds": seconds,
            "measured": found["measured"].get(name, {}),
            "tree": found["tree"],
            "at": found["at"],
        }
        for module, found in modules.items()
        for name, seconds in found["passed"].items()
    }


def keep_results(root: Path, results: Results) -> None:
    """Keep what passed, in the place of what was kept."""
    modules = dict[str, dict[str, Any]]()
    for node_id, result in sorted(results.items()):
        module, _, name = node_id.partition("::")
        found = modules.setdefault(module, {"tree": result["tree"], "at": result["at"], "measured": {}, "passed": {}})
        found["passed"][name] = round(result["seconds"], 2)
        if result["measured"]:
            found["measured"][name] = result["measured"]
    (root / KEPT).write_text(json.dumps(modules, indent=0) + "\n")


def all_results(root: Path) -> list[Results]:
    """Of this checkout's parts, and what is kept with the source."""
    parts = sorted((root / ".full").glob("part-*.json"))
    return [*(json.loads(path.read_text())["results"] for path in parts), kept_results(root)]


def passed_on(tree: Tree, found: Iterable[Results]) -> Results:
    """Those that passed on what they stand on now."""
    passed = dict[str, Mapping[str, Any]]()
    for results in found:
        for name, result in results.items():
            stood = result.get("tree")
            if result["outcome"] == "passed" and stood is not None and stood == tree.stands_on(name):
                passed.setdefault(name, result)
    return passed


RUNNING = "running"
WRITE_SECONDS = 20.0
"""Between two writings of a record: by the end of a run one takes half a second, and a test less."""


class FullRecord:
    """The plugin behind --full: selects, records while tests end, and says at the end what was done.

    Args:
        earlier: the tests that passed already, as the process that records has found them; None: this one records.
    """

    def __init__(self, root: Path, part: int, count: int, earlier: Sequence[str] | None = None) -> None:
        self._path = root / ".full" / f"part-{part}-of-{count}.json"
        self._part, self._count = part, count
        self._written = time.monotonic() - WRITE_SECONDS  # as though it were due
        self._tree = Tree(root)
        self._earlier = set(passed_on(self._tree, all_results(root)) if earlier is None else earlier)
        commit = (git(root, "rev-parse", "HEAD") or "unknown").strip()
        self._at = commit[:12]
        self._skipped = sum(part_of(name, count) == part for name in self._earlier)
        self.record: dict[str, Any] = {
            "commit": commit,
            "dirty": git(root, "status", "--porcelain") != "",
            "part": f"{part}/{count}",
            "started": time.time(),
            "ended": None,
            "results": self._own_earlier(),
        }

    def _own_earlier(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        results: dict[str, Any] = json.loads(self._path.read_text())["results"]
        return {name: result for name, result in results.items() if name in self._earlier}

    def select(self, items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """(to run, not to run): this part, without what passed earlier."""
        mine = [item for item in items if part_of(item.nodeid, self._count) == self._part]
        run = [item for item in mine if item.nodeid not in self._earlier]
        chosen = set(run)
        return run, [item for item in items if item not in chosen]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Under pytest-xdist all processes that run tests have to choose the same ones, also one that starts late."""
        node.workerinput["earlier"] = sorted(self._earlier)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record each test as it ends; one that fails in set-up or tear-down has failed."""
        previous = self.record["results"].get(report.nodeid, {"outcome": RUNNING, "seconds": 0.0})
        outcome = previous["outcome"] if report.passed else report.outcome
        if outcome == RUNNING and report.when == "teardown":
            outcome = "passed"  # not before: another test may have the record written while this one runs
        self.record["results"][report.nodeid] = {
            "outcome": outcome,
            "seconds": previous["seconds"] + report.duration,
            "measured": dict(report.user_properties),  # what the test told with `record_property`
            "tree": self._tree.stands_on(report.nodeid),
            "at": self._at,
        }
        if report.when == "teardown" and time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the record whole or not at all."""
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.record, indent=1))
        temporary.replace(self._path)
        self._written = time.monotonic()

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A run with nothing left to do is a success."""
        self.record["ended"] = time.time()
        self.write()
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._skipped:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line a figure, above pytest's closing line."""
        outcomes = [result["outcome"] for result in self.record["results"].values()]
        counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
        tree = "dirty tree" if self.record["dirty"] else "clean tree"
        terminalreporter.section(f"part {self.record['part']} of the full run")
        terminalreporter.line(f"commit {self._at} ({tree}); {counts}; {self._skipped} not run again")
        terminalreporter.line(f"record: {self._path}")
