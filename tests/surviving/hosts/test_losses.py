"""The one line on a store that has gone, or in which a stranger writes."""

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from allranks.config_guard import GuardConfig
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.losses import describe_silence, explain_loss, explain_want, who_is_here
from allranks.surviving.hosts.place import StoreLostError
from allranks.surviving.hosts.seal import SealError
from tests.surviving.hosts.test_presence import A, C, presence


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StoreLostError("reset"), "the host at a:1, where the others meet, is gone (reset)"),
        (RendezvousConnectionError("reset"), "the host at a:1, where the others meet, is gone (reset)"),
        (SealError("what"), "somebody without this run's secret writes at a:1: what"),
        (RendezvousStateError("what"), "somebody without this run's secret writes at a:1: what"),
    ],
)
def test_one_line_with_the_next_move(error: Exception, said: str) -> None:
    line = str(explain_loss(error, Endpoint("a", 1)))
    assert said in line and "start" in line and "\n" not in line


def test_without_etcd_it_is_no_host_that_is_gone() -> None:
    line = str(explain_loss(StoreLostError("no answer for 8 s"), Endpoint("a", 1, "etcd", "run")))
    assert "the meeting at etcd://a:1/run is lost to this host: no answer for 8 s" in line and "start" in line


def test_why_a_host_is_taken_for_lost() -> None:
    guard = GuardConfig()
    assert describe_silence(guard, suspected=False).endswith("no sign of life for 11.5 s (guard.host_seconds)")
    assert describe_silence(guard, suspected=True).endswith(
        "lost their connection, and it has given no sign of life for 3 s"
    )


def test_who_is_here_are_the_living_that_take_part_or_wait_and_this_host() -> None:
    found = presence(a=0.0, b=9.0)
    assert who_is_here(found, C, 4) == "2 of 4 hosts are here (a, c)"
    found.state.wait_list, found.state.participants = {A}, {}
    assert who_is_here(found, A, 4) == "1 of 4 hosts are here (a)"


def test_why_a_host_waits_no_longer_names_what_the_layout_lacks() -> None:
    given = (presence(a=0.0), A, 3)
    plain = explain_want(*given, "", Endpoint("a", 1), GuardConfig())
    late = "the others did not come to a:1 within 600 s (guard.join_seconds): start the same command on "
    assert plain == f"1 of 3 hosts are here (a); {late}every host"
    short = explain_want(*given, "tp(2) = 2 * n", Endpoint("a", 1), GuardConfig())
    assert short == f"1 of 3 hosts are here (a), too few to train: tp(2) = 2 * n; {late}more hosts"
