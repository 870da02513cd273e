"""The collectives of torch's recorder, as a rank tells them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.observing import collectives
from allranks.observing.collectives import (
    collectives_file,
    find_arrivals,
    known_groups,
    last_collectives,
    name_axis,
    recorded,
    write_collectives,
)
from tests.distributed.pool import Pools
from tests.processes import wait_until


@pytest.mark.distributed
def test_the_collective_that_a_rank_waits_in_is_known(pool: Pools) -> None:
    def case() -> list[dict[str, object]]:
        group = dist.new_group([0, 1], group_desc="mesh_dp_shard")
        dist.all_reduce(torch.ones(3), group=group)
        work = None
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(5, 2), group=group, async_op=True)
            time.sleep(0.1)
            found = json.loads(json.dumps(last_collectives(recorded(), known_groups())))
        dist.barrier()
        if work is None:
            found = json.loads(json.dumps(last_collectives(recorded(), known_groups())))
            dist.all_reduce(torch.ones(5, 2), group=group)
        else:
            work.wait()
        return [one for one in found if one["group"] == group.group_name]  # the pool has had others of this axis

    (first,), (second,) = pool(2).run(case)
    assert first["axis"] == second["axis"] == "dp_shard"
    assert first["waits"] and not second["waits"]
    assert (first["name"], first["sizes"], first["ranks"]) == ("all_reduce", [[5, 2]], [0, 1])
    assert first["group"] == second["group"] and first["seq"] == int(second["seq"]) + 1


def test_without_a_world_there_are_no_collectives() -> None:
    assert recorded() == () and known_groups() == {} and last_collectives((), {}) == [] == find_arrivals((), {})


def test_over_nccl_no_arrivals_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program does over gloo beside it says nothing of who is late in a step."""
    told = {
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "is_p2p": False,
        "collective_seq_id": 1,
        "input_sizes": [[3]],
        "retired": True,
        "state": "completed",
        "time_created_ns": 17,
    }
    on_gpu: list[dict[str, object]] = []
    monkeypatch.setattr(collectives, "known_groups", lambda: {"0": [0, 1]})
    monkeypatch.setattr(collectives, "recorded", lambda name="": on_gpu if "nccl" in name else [told])
    path = tmp_path / "told.json"
    write_collectives(path)
    assert json.loads(path.read_text())["arrivals"] == [["0", 1, 17]]
    on_gpu.append(told)
    write_collectives(path)
    written = json.loads(path.read_text())
    assert written["arrivals"] == [] and len(written["groups"]) == 2


def test_axes_by_their_names() -> None:
    assert [name_axis(text) for text in ("default_pg", "mesh_tp", "agreement")] == ["all ranks", "tp", "agreement"]


@pytest.mark.distributed
def test_when_a_rank_came_to_a_collective_is_told_and_sends_are_not(pool: Pools, tmp_path: Path) -> None:
    def case(folder: str) -> tuple[int, int, list[tuple[str, int, int]], list[object]]:
        group = dist.new_group([0, 1], group_desc="mesh_dp_shard")
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        dist.barrier()
        if dist.get_rank() == 1:
            wait_until((Path(folder) / "first").exists)
        before = time.time_ns()
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        after = time.time_ns()
        if dist.get_rank() == 0:
            (Path(folder) / "first").touch()
        work.wait()
        dist.all_reduce(torch.ones(3), group=alone)
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
        entries, groups = recorded(), known_groups()
        path = collectives_file(Path(folder) / f"rank-{dist.get_rank()}.log")
        write_collectives(path)
        told = [entry for entry in find_arrivals(entries, groups) if entry[2] >= before]
        return before, after, told, json.loads(path.read_text())["arrivals"]

    ranks = pool(2).run(case, str(tmp_path))
    for before, after, told, written in ranks:
        ((_, number, at),) = told
        assert number == 1 and before <= at <= after
        assert written[-1] == list(told[-1])
    ((_, _, at),), ((_, _, later),) = (told for _, _, told, _ in ranks)
    assert at < later
    assert sorted(tmp_path.glob("rank-*")) == [tmp_path / f"rank-{rank}.collectives.json" for rank in (0, 1)]


LATE = 1_000_000_000
"""A number that no group of the pool has come to."""


@pytest.mark.distributed
def test_collectives_of_nccl_have_a_recorder_and_numbers_of_their_own(pool: Pools, tmp_path: Path) -> None:
    """Whose entries are torch's other recorder's in form; a CPU build has none, so that one stands for it here."""

    def case(folder: str) -> list[dict[str, object]]:
        group = dist.new_group([0, 1], group_desc="mesh_tp")
        for _ in range(3):
            dist.all_reduce(torch.ones(3), group=group)

        def newest() -> Any:
            return [entry for entry in recorded() if entry["process_group"][0] == group.group_name][-1]

        wait_until(lambda: newest()["retired"])  # by gloo's own thread, a moment after this one has its result
        one = newest()
        on_gpu = {**one, "collective_seq_id": LATE + 1, "profiling_name": "nccl:all_reduce", "retired": False}
        ended = {**on_gpu, "collective_seq_id": LATE, "state": "completed"}
        dumped = json.dumps({"entries": [ended, {**on_gpu, "state": "scheduled"}]})
        path = collectives_file(Path(folder) / f"rank-{dist.get_rank()}.log")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: dumped, raising=False)
            write_collectives(path)
        told = json.loads(path.read_text())
        assert all(number < LATE for _, number, _ in told["arrivals"]), "a host comes to them before its GPU does"
        return [one for one in told["groups"] if one["group"].endswith(group.group_name) and one["axis"] == "tp"]

    for own, on_gpu in pool(2).run(case, str(tmp_path)):
        assert (own["seq"], own["waits"]) == (3, False)
        assert (on_gpu["seq"], on_gpu["waits"], on_gpu["name"]) == (LATE + 1, True, "all_reduce")
        assert on_gpu["group"] == f"nccl {own['group']}" and on_gpu["ranks"] == [0, 1]


def entry(group: str, number: int, name: str = "send", *, p2p: bool = True, ended: bool = False) -> dict[str, Any]:
    """As NCCL's recorder writes it: what is in a batch has no end of its own, only what stands behind it."""
    return {
        "process_group": [group, "mesh_pp"],
        "profiling_name": f"nccl:{name}",
        "is_p2p": p2p,
        "p2p_seq_id": number if p2p else 0,
        "collective_seq_id": 0 if p2p else number,
        "input_sizes": [[number]],
        "retired": ended,
        "state": "completed" if ended else "scheduled",
    }


@pytest.mark.parametrize("ended", [True, False])
def test_a_batch_of_sends_and_receives_has_ended_where_its_last_entry_has(ended: bool) -> None:
    first = [entry("a", 7), entry("a", 7, "recv"), entry("b", 1, "all_reduce", p2p=False, ended=True)]
    batches = [*first, entry("a", 7, "coalesced", ended=True), entry("a", 8, "recv"), entry("a", 8, "send")]
    told = last_collectives([*batches, entry("a", 8, "coalesced", ended=ended)], {})
    assert [(one["group"], one["name"], one["seq"], one["waits"]) for one in told] == [
        ("a", "recv with send", 8, not ended),
        ("b", "all_reduce", 1, False),
    ]
    within = last_collectives(batches, {})[0]
    assert (within["waits"], within["name"]) == (True, "recv with send"), "a host that stands within a batch waits"
    (own,) = last_collectives([entry("a", 7, "recv 0<-1"), entry("a", 8, "send 0->1")], {})
    assert own["name"] == "recv 0<-1", "each by itself"


def test_what_comes_behind_a_batch_counts() -> None:
    behind = [entry("a", 7), entry("a", 7, "coalesced", ended=True), entry("a", 3, "all_gather", p2p=False)]
    (told,) = last_collectives(behind, {})
    assert (told["name"], told["seq"], told["waits"]) == ("all_gather", 3, True)
