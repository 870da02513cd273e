"""The first words between hosts: the same code and config everywhere, or a refusal that names what differs."""

import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from allranks.errors import ConfigError, ProcessError, RunError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.introduction import announce_plan, facts_of, introduce, learn
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import Seal

ENDPOINT = Endpoint("here", 1)
FACTS = facts_of("package.module:Name", "abc", "2", {"torch": "2.13.0"})


def follow() -> bool:
    return False


def board(store: HashStore, secret: bytes = b"0123456789abcdef") -> Notices:
    return Notices(MeetingStore(store, ENDPOINT, "here", serves=True, call_seconds=5.0), Seal(secret))


def test_who_has_the_same_learns_where_the_run_is() -> None:
    store = HashStore()
    introduce(board(store), FACTS, Path("/runs/x"))
    assert learn(board(store), FACTS, ENDPOINT, 1.0, follow, print) == Path("/runs/x")


def test_of_a_task_in_a_file_the_content_counts(tmp_path: Path) -> None:
    here, there = tmp_path / "a.py", tmp_path / "b.py"
    here.write_text("x = 1")
    there.write_text("x = 1")
    assert facts_of(f"{here}:Name", "abc", "2", {}) == facts_of(str(there), "abc", "2", {})
    there.write_text("x = 2")
    assert facts_of(str(here), "abc", "2", {})["task"] != facts_of(str(there), "abc", "2", {})["task"]


def test_of_a_task_in_a_module_the_content_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine_to_introduce"
    package.mkdir()
    for name in ("__init__.py", "digits.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec = "mine_to_introduce.digits:Digits"
    before = facts_of(spec, "abc", "2", {})["task"]
    assert before == facts_of(str(package / "digits.py"), "abc", "2", {})["task"]
    (package / "digits.py").write_text("x = 2\n")
    assert facts_of(spec, "abc", "2", {})["task"] != before
    assert facts_of("no_such_package.digits:Digits", "abc", "2", {})["task"] == "no_such_package.digits:Digits"
    sys.modules.pop("mine_to_introduce")


@pytest.mark.parametrize("name", sorted(FACTS))
def test_who_has_another_is_refused_with_both(name: str) -> None:
    store = HashStore()
    introduce(board(store), FACTS, Path("/runs/x"))
    with pytest.raises(RunError, match=f"{name} is other on this host and {FACTS[name]} on .*, which leads"):
        learn(board(store), FACTS | {name: "other"}, ENDPOINT, 1.0, follow, print)


def test_another_secret_and_no_word_are_one_line() -> None:
    store = HashStore()
    with pytest.raises(ProcessError, match=r"said nothing for 0\.2 s"):
        learn(board(store), FACTS, ENDPOINT, 0.2, follow, print)
    introduce(board(store), FACTS, Path("/runs/x"))
    with pytest.raises(ConfigError, match="not signed with this host's secret"):
        learn(board(store, b"another secret 16"), FACTS, ENDPOINT, 1.0, follow, print)


def test_who_leads_and_finds_no_run_opens_one() -> None:
    store = HashStore()
    assert learn(board(store), FACTS, ENDPOINT, 1.0, lambda: True, print) is None
    introduce(board(store), FACTS, Path("/runs/x"))
    assert learn(board(store), FACTS, ENDPOINT, 1.0, lambda: True, print) == Path("/runs/x"), (
        "it goes on with that of another"
    )
    came = iter([False, False, True])
    assert learn(board(HashStore()), FACTS, ENDPOINT, 5.0, lambda: next(came), print) is None, (
        "the one that led has gone"
    )


def test_who_plans_is_waited_for_as_long_as_it_leads() -> None:
    """The first dataset() may take hours; the others are told once what they wait for."""
    store, said = HashStore(), list[str]()
    announce_plan(board(store))
    threading.Timer(1.0, introduce, (board(store), FACTS, Path("/runs/x"))).start()
    began = time.monotonic()
    assert learn(board(store), FACTS, ENDPOINT, 0.2, follow, said.append) == Path("/runs/x")
    assert time.monotonic() - began > 0.5
    (line,) = said
    assert line.startswith(f"{socket.gethostname()} leads and plans the layout")
    again = HashStore()
    announce_plan(board(again))
    assert learn(board(again), FACTS, ENDPOINT, 0.2, lambda: True, print) is None, "who planned is lost"


def test_who_is_lost_while_it_plans_may_have_said_why() -> None:
    notices, calls = board(HashStore()), list[int]()
    announce_plan(notices)

    def seek() -> bool:
        calls.append(1)
        if len(calls) > 1:
            raise StoreLostError("connection closed")
        return False

    with pytest.raises(ProcessError, match="led, planned the layout and ended before there was a run: connection"):
        learn(notices, FACTS, ENDPOINT, 1.0, seek, print)
    with pytest.raises(StoreLostError):
        learn(board(HashStore()), FACTS, ENDPOINT, 1.0, seek, print)
