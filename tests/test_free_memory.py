"""Free is what the place, the host and every limit of a container leave."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from allranks import free_memory
from allranks.free_memory import free_bytes, free_host_bytes, group_limit_bytes, whole_host_bytes


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /sys/fs/cgroup, of a process that is in no group yet."""
    monkeypatch.setattr(free_memory, "_MOUNT", tmp_path / "groups")
    monkeypatch.setattr(free_memory, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path / "groups"


def test_free_is_what_both_the_place_and_the_memory_have(
    tmp_path: Path, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(place: int, memory: int) -> int:
        fake: Any = SimpleNamespace(f_bavail=place, f_frsize=10)
        monkeypatch.setattr(os, "statvfs", lambda path: fake)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
        return free_bytes(tmp_path)

    assert [here(3, 40), here(5, 40), here(0, 40)] == [30, 40, 0]


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_containers_own_limit_counts(tmp_path: Path, groups: Path) -> None:
    (tmp_path / "membership").write_text("4:cpu:/elsewhere\n0::/pod/inner\n")
    assert free_memory._left_to_groups() == []
    stat = "anon 3900\ninactive_file 300\nactive_file 100\n"
    for folder, limit in ((groups / "pod" / "inner", "max"), (groups / "pod", "5000")):
        write(folder, {"memory.max": f"{limit}\n", "memory.current": "4500\n", "memory.stat": stat})
    assert free_memory._left_to_groups() == [900] and free_bytes(tmp_path) == free_host_bytes() == 900
    write(groups / "pod" / "inner", {"memory.max": "4000"})
    assert free_memory._left_to_groups() == [0, 900]
    assert whole_host_bytes() == 4000, "of all that limit it the least"
    (tmp_path / "membership").unlink()
    assert free_memory._left_to_groups() == []
    assert whole_host_bytes() == psutil.virtual_memory().total


def test_so_does_one_of_the_first_version(tmp_path: Path, groups: Path) -> None:
    (tmp_path / "membership").write_text("5:cpu:/\n4:hugetlb,memory:/docker/abc\n0::/\n")
    stat = "cache 1\ninactive_file 7\ntotal_inactive_file 300\ntotal_active_file 50\n"
    write(groups / "memory", {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "4500", "memory.stat": stat})
    assert free_memory._left_to_groups() == [850], "the container sees its own group as the root"
    assert whole_host_bytes() == 5000
    write(groups / "memory", {"memory.limit_in_bytes": str(2**63 - 4096)})
    assert whole_host_bytes() == psutil.virtual_memory().total, "that is no limit"
    write(groups / "memory", {"memory.limit_in_bytes": "5000"})
    inner = groups / "memory" / "docker" / "abc"
    write(inner, {"memory.limit_in_bytes": "4600", "memory.usage_in_bytes": "4500", "memory.stat": stat})
    assert free_memory._left_to_groups() == [450, 850]


def test_the_tightest_group_limits_unless_it_may_take_all(
    tmp_path: Path, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10_000))
    (tmp_path / "membership").write_text("8:memory:/job/inner\n")
    assert group_limit_bytes() is None
    for folder, limit in (("job/inner", 9223372036854771712), ("", 9223372036854771712)):
        write(groups / "memory" / folder, {"memory.limit_in_bytes": str(limit)})
    assert group_limit_bytes() is None, "no limit, as cgroup v1 writes it"
    write(groups / "memory" / "job", {"memory.limit_in_bytes": "4096"})
    assert group_limit_bytes() == 4096
