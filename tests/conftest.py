"""Stricter than production: a test that leaks its environment, a process or a file fails."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.distributed.pool import Pools
from tests.full_record import FullRecord, parse_part
from tests.leaks import (
    adopt_orphans,
    environment_changes,
    leftover_children,
    leftover_files,
    list_tree,
    living_children,
)
from tests.sampling import left_to_full
from tests.smoke import NOTHING_NAMED, is_smoke, nothing_named

ROOT = Path(__file__).parents[1]

# The same examples every time, nothing written into the tree, and no time limit: machines differ.
hypothesis.settings.register_profile("allranks", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("allranks")

FULL = pytest.StashKey[FullRecord]()
TREE = pytest.StashKey[set[str]]()
LEFT = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `make test-full`."""
    parser.addoption(
        "--full", action="store_true", help="run the tests marked full too, and record the results in .full/"
    )
    parser.addoption("--part", default="1/1", help="with --full: run part i of n, as i/n")


def pytest_configure(config: pytest.Config) -> None:
    """See orphans as children, keep nothing of runs for this machine's plans, and keep a record under --full."""
    adopt_orphans()
    if "gpu" not in (config.getoption("markexpr") or "").split():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the others expect the processor's bits, also where a GPU is at hand
    # torch asks the name service who 127.0.0.1 is, once a connection: a lost answer costs resolv.conf's five seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="allranks-configuration-")
    if config.getoption("--full"):
        # Under pytest-xdist one process records, and tells the others what passed already.
        told: dict[str, list[str]] | None = getattr(config, "workerinput", None)
        earlier = None if told is None else told["earlier"]
        config.stash[FULL] = FullRecord(config.rootpath, *parse_part(config.getoption("--part")), earlier)
        if told is None:
            config.pluginmanager.register(config.stash[FULL])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Forget what runs took."""
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist whether all of the tests are asked for: its own arguments are not the user's."""
    node.workerinput["whole"] = is_whole(node.config)


def is_whole(config: pytest.Config) -> bool:
    """Whether no test is chosen by its path."""
    told: dict[str, bool] = getattr(config, "workerinput", {})
    return told.get("whole", config.args_source is pytest.Config.ArgsSource.TESTPATHS)


@pytest.hookimpl(tryfirst=True)  # before `-m smoke` looks for the mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark samples and the smoke subset; leave out long tests, or under --full other parts and what passed."""
    config.stash[NOTHING_NAMED] = nothing_named([item.nodeid for item in items]) if is_whole(config) else []
    for item in left_to_full(items):
        item.add_marker("full")
    for item in items:
        if is_smoke(item.nodeid, (mark.name for mark in item.iter_markers())):
            item.add_marker("smoke")
    if FULL in config.stash:
        run, rest = config.stash[FULL].select(items)
    else:
        run = [item for item in items if item.get_closest_marker("full") is None]
        rest = [item for item in items if item.get_closest_marker("full") is not None]
    items[:] = run
    config.hook.pytest_deselected(items=rest)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu skips itself where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what is in the tree."""
    session.config.stash[TREE] = list_tree(session.config.rootpath)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that left something in the tree."""
    left = leftover_files(session.config.stash[TREE], list_tree(session.config.rootpath))
    session.config.stash[LEFT] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left in the tree."""
    for path in config.stash.get(LEFT, []):
        terminalreporter.line(f"LEFT IN THE TREE: {path} (tests write under tmp_path only)", red=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """`pool(world_size).run(function, *args)`: see tests/distributed/pool.py."""
    with Pools() as pools:
        yield pools


@pytest.fixture(autouse=True)
def no_environment_leak() -> Iterator[None]:
    """A test that changes os.environ without putting it back fails (use monkeypatch)."""
    before = dict(os.environ)
    yield
    if changes := environment_changes(before, os.environ):
        os.environ.clear()
        os.environ.update(before)
        pytest.fail("left in the environment: " + "; ".join(changes))


@pytest.fixture(autouse=True)
def own_configuration(no_environment_leak: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's plan is corrected by what another test's run took."""
    monkeypatch.setenv("XDG_CONFIG_HOME", os.path.join(os.environ["XDG_CONFIG_HOME"], uuid.uuid4().hex))


@pytest.fixture(autouse=True)
def no_leftover_process(pool: Pools) -> Iterator[None]:
    """A test that leaves a child process, or an orphan of one, fails."""
    before = living_children()
    yield
    if left := leftover_children(before, lambda: pool.pids):
        pytest.fail("left running (killed now): " + "; ".join(left))
