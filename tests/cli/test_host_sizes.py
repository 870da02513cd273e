"""How many workers each of several hosts starts, and which layout that makes; test_running_spares.py runs it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from allranks.cli import running
from allranks.cli.host_sizes import check_all_sizes, choose_workers, layout_of_hosts, plan_for_hosts
from allranks.cli.main import main
from allranks.errors import LayoutError
from allranks.hosts_request import Endpoint, HostsRequest
from allranks.request import TrainRequest
from allranks.surviving import forkserver
from allranks.training.planned_layout import Decided, settle
from allranks.training.prepare import Prepared, open_run, prepare, resolve_layout
from allranks.verdict import Decision
from tests.commands import POINTS
from tests.hosts import SECRET


@pytest.mark.parametrize(
    ("batch", "nodes", "layout", "workers"),
    [(8, 2, None, 4), (7, 2, None, 3), (64, 2, None, 8), (1, 2, None, 8), (8, 2, "ddp", 8)],
)
def test_without_a_layout_no_worker_is_left_without_a_sample(
    batch: int, nodes: int, layout: str | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    request = TrainRequest(task_spec=POINTS, overrides=(f"train.global_batch={batch}",), layout=layout)
    hosts = HostsRequest(nodes, nodes, Endpoint("hosta", 29500))
    nproc, decision = choose_workers(prepare(request), request, hosts)
    assert (nproc, decision.what) == (workers, f"{nodes * workers} processes on {nodes} hosts")
    assert (f"train.global_batch={batch} gives no more" in decision.because) == (workers < 8)


@pytest.mark.parametrize(
    ("decided", "workers"),
    [
        (("layout.dp_shard=*",), 4),
        (("layout.tp=2", "layout.dp_shard=*"), 4),
        (("layout.tp=16", "layout.dp_shard=*"), 8),
    ],
)
def test_a_planned_run_starts_as_many_workers_again_and_so_does_a_host_that_comes_later(
    decided: tuple[str, ...], workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one was planned for more workers than samples, which --nproc had named."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    hosts = HostsRequest(2, 2, Endpoint("hosta", 29500))
    overrides = ("train.steps=9", "train.global_batch=8")
    request = TrainRequest(task_spec=POINTS, overrides=overrides, run=tmp_path / "run")
    before = prepare(request)
    assert choose_workers(before, request, hosts)[0] == 4
    made = open_run(settle(before, Decided((), decided, {"decided": list(decided)})), request)
    made.journal().write_text('{"event": "step", "step": 1}\n')
    made.release()
    for again in (request, TrainRequest(resume=tmp_path / "run")):
        after = prepare(again)
        assert after.config.layout.chosen
        nproc, _ = choose_workers(after, again, hosts)
        assert nproc == workers and resolve_layout(after.config, 2 * nproc, 2).dp <= 8
    named = replace(request, layout="dp_shard=*")
    assert choose_workers(prepare(named), named, hosts)[0] == 8, "what somebody names is not cut"


HOSTS = ("--nodes", "2", "--rendezvous", "c10d://hosta:29500", "--nproc", "8")


def decide_always(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """A plan decides so, whatever it is asked."""
    decided = Decided((Decision("layout as planned", "it is a test"),), words)
    monkeypatch.setattr("allranks.training.planned_layout.decide_layout", lambda *_, **__: decided)


def test_what_a_plan_may_decide_is_not_refused_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ddp this is a rank without a sample; as tp=2 it is not."""
    reached: list[object] = []

    def run(*given: object) -> tuple[int, None]:
        reached.append(given)
        return 0, None

    monkeypatch.setattr(running, "run_on_hosts", run)
    monkeypatch.setattr(forkserver, "start", lambda *_, **__: None)
    monkeypatch.setenv("ALLRANKS_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)
    assert main(["train", POINTS, "train.global_batch=8", *HOSTS]) == 0 and len(reached) == 1
    assert main(["train", POINTS, "train.global_batch=8", *HOSTS, "--layout", "ddp"]) == 2 and len(reached) == 1
    request = TrainRequest(task_spec=POINTS, overrides=("train.global_batch=8",))
    hosts = HostsRequest(2, 2, Endpoint("hosta", 29500))
    decide_always(monkeypatch, "layout.tp=2", "layout.dp_shard=*")
    settled, _ = plan_for_hosts(prepare(request), request, hosts, 8)
    assert str(resolve_layout(settled.config, 16, 2)) == "dp_shard=8,tp=2"
    decide_always(monkeypatch)  # ddp
    with pytest.raises(LayoutError, match=r"train\.global_batch\(8\) < dp_replicate \* dp_shard\(16\)"):
        plan_for_hosts(prepare(request), request, hosts, 8)


def test_what_is_shown_is_what_the_run_takes_where_a_plan_does_not_fit_every_number_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    decide_always(monkeypatch, "layout.tp=2", "layout.dp_shard=*")
    words = ["train", POINTS, "--show", "--json", *HOSTS, "--nodes", "1:2", "--nproc"]
    assert main([*words, "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    (decision,) = [one for one in told["decisions"] if one["what"] == "layout ddp, the default"]
    assert "it could not be planned: --nodes 1:2: with 1 of them, " in decision["because"]
    assert told["cut"]["data-parallel ranks"] == 2
    assert main([*words, "2"]) == 0 and json.loads(capsys.readouterr().out)["config"]["layout.tp"] == 2
    assert main([*words, "1", "--layout", "tp=4,dp_replicate=*"]) == 2, "nor is one shown that the run refuses"


def test_a_layout_that_the_hosts_cannot_share_is_refused() -> None:
    request = TrainRequest(task_spec=POINTS, layout="dp_replicate=3")
    hosts = HostsRequest(2, 2, Endpoint("hosta", 29500))
    with pytest.raises(LayoutError, match="asks for 3 processes, which 2 hosts cannot share: say --nproc"):
        choose_workers(prepare(request), request, hosts)


def from_to(least: int, most: int) -> HostsRequest:
    return HostsRequest(most, least, Endpoint("hosta", 29500))


def prepared(layout: str, batch: int = 64) -> Prepared:
    overrides = ("train.steps=9", f"train.global_batch={batch}")
    return prepare(TrainRequest(task_spec=POINTS, overrides=overrides, layout=layout))


@pytest.mark.parametrize(
    ("layout", "hosts", "nproc", "found", "told"),
    [
        ("ddp", from_to(1, 4), 1, "dp_replicate=4", []),
        (
            "tp=2,dp_shard=*",
            from_to(1, 3),
            1,
            "tp=2",
            ["of 3 workers on 3 hosts 2 train, and the others are spares", "2 hosts at least"],
        ),
        ("tp=2,dp_shard=*", from_to(2, 4), 1, "dp_shard=2,tp=2", []),
        ("tp=2,dp_shard=*", from_to(1, 3), 3, "dp_shard=4,tp=2", ["of 9 workers on 3 hosts 8 train, and the others "]),
        ("ddp", from_to(1, 4), 2, "dp_replicate=6", ["of 8 workers on 4 hosts 6 train, and the others are spares"]),
        ("dp_shard=2", from_to(2, 3), 1, "dp_shard=2", ["of 3 workers on 3 hosts 2 train, and the others are spares"]),
    ],
)
def test_what_is_left_over_and_how_few_can_train_is_said_at_the_start(
    layout: str, hosts: HostsRequest, nproc: int, found: str, told: list[str]
) -> None:
    there, decisions = layout_of_hosts(prepared(layout, 6 if layout == "ddp" else 64), nproc, hosts)
    assert str(there) == found
    assert len(decisions) == len(told)
    assert all(one.what.startswith(words) for one, words in zip(decisions, told, strict=True))


@pytest.mark.parametrize(
    ("layout", "hosts", "nproc", "told"),
    [
        (
            "tp=4,dp_shard=*",
            from_to(1, 3),
            1,
            r"--nodes 1:3 with 1 worker\(s\) a host: the layout does not take 3 work",
        ),
        ("tp=2,dp_shard=*", from_to(3, 3), 1, r"tp\(2\) .* = 2 \* n, but the world has 3 processes"),
        ("tp=2", from_to(2, 3), 2, r"never take more than 2 workers, on 1 host\(s\): say --nodes 1:3, or name one"),
    ],
)
def test_what_no_number_of_hosts_fits_is_refused(layout: str, hosts: HostsRequest, nproc: int, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        layout_of_hosts(prepared(layout), nproc, hosts)


def test_a_plan_is_taken_only_where_it_leaves_nobody_over() -> None:
    with pytest.raises(LayoutError, match=r"--nodes 1:4: with 1 of them, .*but the world has 1 process"):
        check_all_sizes(prepared("tp=2,dp_replicate=*"), 1, from_to(1, 4))
    check_all_sizes(prepared("tp=2,dp_replicate=*"), 2, from_to(1, 4))


def test_where_the_layout_leaves_workers_over_a_host_starts_all_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    request = TrainRequest(task_spec=POINTS, layout="tp=2,dp_shard=*")
    assert choose_workers(prepare(request), request, from_to(1, 3))[0] == 3
    with pytest.raises(LayoutError, match="which 3 hosts cannot share: say --nproc"):
        choose_workers(prepare(request), request, from_to(3, 3))
