"""What stages of a pipeline send: how often, how much, and over which link."""

from typing import Any

import pytest

from allranks.plan import Estimate
from allranks.planning.axis_traffic import axes_of
from allranks.planning.estimate import estimate
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.pipeline_traffic import hop_seconds, message_bytes, messages_by_link
from allranks.planning.setting import Setting
from tests.planning.profiles import choose, cluster, decoder

PROFILE = decoder(layers=16, hidden=1024, ffn=4096, seq=2048, vocab=256)
ACTIVATION = 4.0 * 2048 * 1024
"""Autocast leaves what goes from block to block in float32."""


def of(pp: int, nodes: int = 1, devices: int = 8, **changes: Any) -> Estimate:
    return estimate(PROFILE, cluster(nodes, devices), choose(64, 2, pp=pp, **changes))


def pp_rows(found: Estimate) -> dict[str, Any]:
    return {row.link: row for row in found.traffic if row.axis == "pp"}


def test_a_stage_in_the_middle_sends_on_and_back() -> None:
    rows = pp_rows(of(8))
    assert list(rows) == ["inside"]
    assert rows["inside"].count == 2 * 32
    assert rows["inside"].sent_bytes == 2 * 32 * 2 * ACTIVATION


def test_of_two_stages_each_sends_one_way() -> None:
    row = pp_rows(of(2, dp_replicate=4))["inside"]
    assert (row.count, row.sent_bytes) == (8, 8 * 2 * ACTIVATION)


def test_each_link_has_its_own_row() -> None:
    """Two nodes of four: the hop in the middle leaves the node, both ways; all others stay inside."""
    rows = pp_rows(of(8, nodes=2, devices=4))
    assert (rows["inside"].count, rows["between"].count) == (2 * 32, 32)
    assert rows["between"].sent_bytes == 32 * 2 * ACTIVATION
    far_apart = pp_rows(of(2, nodes=2, devices=4, dp_replicate=4))
    assert list(far_apart) == ["between"]


def test_what_is_waited_for_is_the_steps_time() -> None:
    found = of(4, nodes=4, devices=1)
    (row,) = pp_rows(found).values()
    assert row.hidden_seconds == pytest.approx(0.0)
    assert row.seconds == pytest.approx(found.time.pipeline)


@pytest.mark.parametrize(
    ("schedule", "pp", "messages"),
    [("1f1b", 4, 2), ("1f1b", 2, 1), ("interleaved", 4, 4), ("interleaved", 2, 3), ("zbv", 4, 4), ("zbv", 2, 2)],
)
def test_messages_of_a_micro_step(schedule: str, pp: int, messages: int) -> None:
    """zbv turns around on the last rank, which sends itself nothing."""
    layout = choose(64, 1, pp=pp, schedule=schedule).layout
    setting = Setting(64, 1, pp=pp, chunks=layout.num_stages // pp, schedule=schedule)
    assert messages_by_link(setting, 8) == (messages, 0)


def test_what_is_cut_is_sent_in_parts() -> None:
    whole = message_bytes(PROFILE, Setting(64, 2, pp=2))
    assert whole == ACTIVATION  # of two samples in 16 bits
    assert message_bytes(PROFILE, Setting(64, 2, pp=2, cp=2)) == whole / 2
    assert message_bytes(PROFILE, Setting(64, 2, pp=2, tp=4)) == whole
    scattered = Mechanisms(scattered_sends=True)
    assert message_bytes(PROFILE, Setting(64, 2, pp=2, tp=4, mechanisms=scattered)) == whole / 4


def test_what_runs_behind_computation_is_hidden() -> None:
    there, half = cluster(4, 1), Mechanisms(overlap_pipeline=0.5)
    plain, overlapped = Setting(64, 1, pp=4), Setting(64, 1, pp=4, mechanisms=half)
    waits = [hop_seconds(PROFILE, setting, axes_of(there, setting)) for setting in (plain, overlapped)]
    assert waits[1] == pytest.approx(waits[0] / 2)
    assert hop_seconds(PROFILE, Setting(64, 1), axes_of(there, Setting(64, 1))) == 0.0
