"""What a sentinel's verdict names: a kind that exists, for each of the verdicts that there are."""

from allranks.verdict import FINDINGS
from allranks.verifying.findings import KINDS, OTHER
from allranks.verifying.sentinel_kinds import BUFFERS, NAMED, kinds_named


def test_every_verdict_names_kinds_that_there_are() -> None:
    assert set(NAMED) == set(FINDINGS)
    for kinds in (*NAMED.values(), BUFFERS):
        assert kinds and len(set(kinds)) == len(kinds) and set(kinds) <= set(KINDS) - {OTHER}


def test_a_buffer_that_differs_is_told_from_a_parameter() -> None:
    said = (
        "after step 8 rank 0 (a) and 1 (a) hold different values: {} is not alike where it has to be; the run goes on"
    )
    assert kinds_named("replicas_differ", said.format("buffer mean")) == ("S25",)
    assert kinds_named("replicas_differ", said.format("buffers.weight"))[0] == "S39"
    assert kinds_named("optimizer_unlinked", "") == ("S12",)
