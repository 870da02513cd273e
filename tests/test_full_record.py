"""`make test-full`: split, recorded, resumed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.full_record import (
    KEPT,
    TOLD,
    FullRecord,
    Tree,
    all_results,
    keep_results,
    kept_results,
    parse_part,
    part_of,
    passed_on,
)
from tests.test_leaks import run_pytest

SAMPLE = """
import pytest
from pathlib import Path

@pytest.mark.full
def test_long(record_property): record_property("seconds", 2.5)

@pytest.mark.parametrize("n", range(9))
def test_short(n): pass

def test_broken(): assert (Path(__file__).parents[1] / "repaired").exists()
"""


def make_repository(folder: Path) -> None:
    """An empty git work tree that ignores what the runs leave."""
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".gitignore").write_text(".full/\n__pycache__/\nrepaired\n")


def test_part_i_of_n() -> None:
    assert parse_part("2/4") == (2, 4)
    for wrong in ("0/4", "5/4", "2", "a/b", "-1/2", "1/0"):
        with pytest.raises(pytest.UsageError, match="give i/n"):
            parse_part(wrong)


def test_every_test_is_in_exactly_one_part_and_stays_there() -> None:
    names = [f"tests/test_x.py::test_{n}" for n in range(200)]
    parts = [part_of(name, 4) for name in names]
    assert set(parts) == {1, 2, 3, 4}
    assert part_of("tests/test_x.py::test_0", 4) == parts[0]


def test_a_result_stands_on_every_file_but_other_test_modules(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text("from tests.test_b import x\n")
    (tests / "test_b.py").write_text("from tests.test_c import x\n")
    (tests / "test_c.py").write_text("x = 1\n")
    assert Tree(tmp_path).stands_on("tests/test_a.py::test") is None
    make_repository(tmp_path)

    def stands() -> dict[str, str | None]:
        tree = Tree(tmp_path)
        return {name: tree.stands_on(f"tests/test_{name}.py::test[1]") for name in "abc"}

    def changed(path: Path, text: str) -> set[str]:
        before = stands()
        path.write_text(text)
        after = stands()
        return {name for name in "abc" if before[name] != after[name]}

    assert changed(tmp_path / "repaired", "ignored") == set()
    assert changed(tmp_path / "new.py", "x = 1\n") == set("abc")
    assert changed(tmp_path / "new.py", "x = 2\n") == set("abc")
    assert changed(tests / "helper.py", "x = 2\n") == set("abc")
    assert changed(tests / "test_c.py", "x = 2\n") == set("abc")
    assert changed(tests / "test_b.py", "from tests.test_c import y\n") == {"a", "b"}
    assert changed(tests / "test_a.py", "x = 1\n") == {"a"}
    assert changed(tests / "test_b.py", "x = 1\n") == {"b"}
    # Pages and stored results: for what names them, and for what imports that.
    (tmp_path / "docs").mkdir()
    assert changed(tmp_path / "docs" / "new.md", "words") == changed(tmp_path / "README.md", "words") == set()
    assert changed(tests / "test_c.py", "page = ROOT / 'docs'\n") == {"c"}
    assert changed(tests / "test_b.py", "from tests.test_c import page\n") == {"b"}
    assert changed(tests / "test_a.py", "results = json.loads(docs)\n") == {"a"}
    for page in (tmp_path / "docs" / "new.md", tmp_path / "README.md"):
        assert changed(page, "other words") == {"b", "c"}
    assert changed(tests / "read.md", "of the tests") == set("abc")
    # Words in the package are for those, too, and what its modules do for all; the command prints its docstrings.
    package = tmp_path / "src" / "allranks"
    (package / "cli").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    assert changed(package / "x.py", 'def f():\n    """One."""\n    return 1\n') == set("abc")
    assert changed(package / "x.py", 'def f():  # one\n    """Another."""\n    return 1\n') == {"b", "c"}
    assert changed(package / "x.py", "def f():\n    return 2\n") == set("abc")
    assert changed(tmp_path / "tools" / "write.py", "x = 1\n") == {"b", "c"}
    assert changed(package / "cli" / "x.py", '"""One."""\n') == set("abc")
    assert changed(package / "cli" / "x.py", '"""Another."""\n') == set("abc")
    (tmp_path / TOLD).parent.mkdir()
    assert changed(tmp_path / TOLD, "of what passed") == set()
    # What `bench` alone loads is for those that load it, and for pages.
    (package / "cli" / "bench.py").write_text("def bench():\n    import allranks.measures\n")
    assert changed(package / "measures.py", "y = 1\n") == {"b", "c"}
    assert changed(tests / "test_a.py", "from allranks.measures import y\n") == {"a"}
    assert changed(package / "measures.py", "y = 2\n") == set("abc")
    assert changed(tests / "test_a.py", "x = 1\n") == {"a"}
    assert changed(package / "x.py", "def f():\n    return 3\n") == set("abc")
    assert changed(package / "cli" / "bench.py", "import allranks.measures\n") == set("abc")
    assert changed(package / "measures.py", "y = 3\n") == set("abc")


def test_only_what_passed_on_the_same_source_counts(tmp_path: Path) -> None:
    make_repository(tmp_path)
    (tmp_path / "test_x.py").write_text("")
    stood = Tree(tmp_path).stands_on("test_x.py::a")
    outcomes = {"a": ("passed", stood), "b": ("failed", stood), "c": ("skipped", stood), "d": ("passed", "other")}
    results = {f"test_x.py::{name}": {"outcome": how, "tree": tree} for name, (how, tree) in outcomes.items()}
    assert set(passed_on(Tree(tmp_path), [results])) == {"test_x.py::a"}
    (tmp_path / "new.py").touch()
    assert passed_on(Tree(tmp_path), [results]) == {}


@pytest.mark.full
def test_what_is_kept_with_the_source_counts_in_another_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_repository(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--full")
    first = run_pytest(tmp_path, SAMPLE)
    ran = passed_on(Tree(tmp_path), all_results(tmp_path))
    (tmp_path / KEPT).parent.mkdir(parents=True)
    keep_results(tmp_path, ran)
    shutil.rmtree(tmp_path / ".full")
    assert passed_on(Tree(tmp_path), [kept_results(tmp_path)]).keys() == ran.keys()
    assert len(ran) == 10
    measured = {name.partition("::")[2]: result["measured"] for name, result in kept_results(tmp_path).items()}
    assert (measured.pop("test_long"), *measured.values()) == ({"seconds": 2.5}, *[{}] * 9)
    second = subprocess.run(first.args, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 10 deselected" in second.stdout, second.stdout


def test_a_test_has_passed_when_its_teardown_has(tmp_path: Path) -> None:
    """The record may be written while another test runs, and that be killed."""
    make_repository(tmp_path)
    record = FullRecord(tmp_path, 1, 1)

    def told(when: str, outcome: str = "passed") -> str:
        report = pytest.TestReport("t.py::a", ("t.py", 1, "a"), {}, outcome, None, when)  # type: ignore[arg-type]
        record.pytest_runtest_logreport(report)
        return str(record.record["results"]["t.py::a"]["outcome"])

    assert [told("setup"), told("call"), told("teardown")] == ["running", "running", "passed"]
    record.record["results"].clear()
    assert [told("setup"), told("call", "failed"), told("teardown")] == ["running", "failed", "failed"]


@pytest.mark.parametrize("processes", ["", pytest.param("-n 2 --dist loadfile", marks=pytest.mark.full)])
def test_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str) -> None:
    make_repository(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--full {processes}")
    first = run_pytest(tmp_path, SAMPLE)
    assert "1 failed, 10 passed" in first.stdout, first.stdout + first.stderr
    assert "10 passed, 1 failed, 0 skipped; 0 not run again" in first.stdout
    (tmp_path / "repaired").touch()
    second = subprocess.run(first.args, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ("1 passed" if processes else "1 passed, 10 deselected") in second.stdout
    assert "11 passed, 0 failed, 0 skipped; 10 not run again" in second.stdout
    third = subprocess.run(first.args, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (third.returncode, "11 not run again" in third.stdout) == (0, True)
    record = json.loads((tmp_path / ".full" / "part-1-of-1.json").read_text())
    assert (record["commit"], record["dirty"], len(record["results"])) == ("unknown", True, 11)


def test_parts_make_the_whole_and_long_tests_need_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repository(tmp_path)
    short = run_pytest(tmp_path, SAMPLE)
    assert "1 failed, 9 passed, 1 deselected" in short.stdout
    assert not (tmp_path / ".full").exists()
    for part in ("1/2", "2/2"):
        monkeypatch.setenv("PYTEST_ADDOPTS", f"--full --part {part}")
        subprocess.run(short.args, cwd=tmp_path, capture_output=True, check=False)
    records = [json.loads(path.read_text())["results"] for path in sorted((tmp_path / ".full").glob("*.json"))]
    assert [bool(record) for record in records] == [True, True]
    assert len(records[0]) + len(records[1]) == len(records[0] | records[1]) == 11


def test_a_record_names_the_commit(tmp_path: Path) -> None:
    make_repository(tmp_path)
    author = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", *author, "commit", "-qm", "first"], cwd=tmp_path, check=True)
    record = FullRecord(tmp_path, 1, 1).record
    assert (len(record["commit"]), record["dirty"]) == (40, False)
