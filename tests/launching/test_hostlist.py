"""Slurm's short form of host names."""

from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.launching.hostlist import expand_hosts, first_host


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("node1", ["node1"]),
        ("login,gpu3", ["login", "gpu3"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("a[2,5-6]b,c", ["a2b", "a5b", "a6b", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-[003].site", ["gpu-003.site"]),
    ],
)
def test_expands_the_common_form(hostlist: str, hosts: list[str]) -> None:
    assert expand_hosts(hostlist) == hosts


@pytest.mark.parametrize("hostlist", ["", "node[1-", "node[a-c]", "node[1,]", ",node", "node]"])
def test_an_unreadable_list_is_refused(hostlist: str) -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR") as caught:
        expand_hosts(hostlist)
    assert "\n" not in str(caught.value)


def test_scontrol_knows_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$*" = "show hostnames odd[7-9]" ] && printf "seven\\neight\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert first_host("odd[7-9]") == "seven"


def test_without_or_with_a_failing_scontrol_we_read_it_ourselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_host("odd[07-9]") == "odd07"
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    assert first_host("odd[07-9]") == "odd07"
