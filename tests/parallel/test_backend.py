"""Device, backend and interface: what is chosen with because, what is refused, and that it starts."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from allranks.errors import ConfigError, LayoutError, ProcessError
from allranks.layout import Layout
from allranks.parallel import allocator, backend
from allranks.parallel.backend import choose_device, start, stop, take_device
from allranks.parallel.own_gpus import share_gpus
from allranks.process_environment import ALONE, ProcessEnvironment
from allranks.surviving.forkserver import StartMethod
from allranks.surviving.launch import launch
from allranks.verdict import Decision
from tests.parallel.test_store import free_port

FOUR = ProcessEnvironment("torchrun", 3, 3, 4, 4, master_addr="127.0.0.1", master_port=29500)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int, *, nccl: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)


@pytest.mark.parametrize(
    ("gpus", "environment", "requested", "asked", "device", "name", "because"),
    [
        (0, FOUR, "auto", "auto", "cpu", "gloo", "the device is cpu"),
        (8, FOUR, "cpu", "auto", "cpu", "gloo", "the device is cpu"),
        (8, FOUR, "auto", "auto", "cuda:3", "nccl", "each process has a GPU of its own"),
        (4, FOUR, "cuda", "gloo", "cuda:3", "gloo", "train.backend says so"),
        (4, FOUR, "cuda", "nccl", "cuda:3", "nccl", "train.backend says so"),
        (2, FOUR, "auto", "auto", "cuda:1", "gloo", "4 processes of this host share 2 GPUs"),
        (1, FOUR, "auto", "auto", "cuda:0", "gloo", "4 processes of this host share 1 GPUs"),
        (1, replace(FOUR, launcher="slurm", own_device=True), "auto", "auto", "cuda:0", "nccl", "a GPU of its own"),
        (1, replace(FOUR, launcher="openmpi"), "auto", "auto", "cuda:0", "gloo", "save no memory and are slow"),
        (1, replace(FOUR, launcher="openmpi"), "auto", "nccl", "cuda:0", "nccl", "train.backend says so"),
        (4, replace(FOUR, world_size=8, rank=7, num_nodes=2, node_rank=1), "auto", "auto", "cuda:3", "nccl", "own"),
    ],
)
def test_the_choice(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    environment: ProcessEnvironment,
    requested: str,
    asked: str,
    device: str,
    name: str,
    because: str,
) -> None:
    machine(monkeypatch, gpus)
    choice = choose_device(environment, requested, asked)
    assert (choice.device, choice.backend) == (torch.device(device), name)
    said = [str(decision) for decision in choice.decisions]
    assert [line.split()[0] for line in said[:3]] == ["device", "backend", "interface"]
    assert [line.split()[0] for line in said[3:]] == (["NCCL"] if (name, environment.num_nodes) == ("nccl", 2) else [])
    assert because in said[1]
    assert said[2].startswith(f"interface {choice.interface or 'left to the backend'}, because ")


@pytest.mark.parametrize(
    ("gpus", "environment", "rules", "device", "share"),
    [
        (8, FOUR, (), "cuda:7", ["cuda:6", "cuda:7"]),
        (8, replace(FOUR, rank=1, local_rank=1), (("a", "cuda:0"),), "cuda:2", ["cuda:2", "cuda:3"]),
        (8, replace(FOUR, rank=5, local_rank=1, world_size=8), (), "cuda:3", ["cuda:2", "cuda:3"]),
        (2, FOUR, (), "cuda:1", ["cuda:1"]),
        (3, ALONE, (("a", "cuda:1"), ("b", "cpu")), "cuda:1", ["cuda:0", "cuda:1", "cuda:2"]),
        (2, replace(FOUR, launcher="slurm", own_device=True), (), "cuda:1", ["cuda:0", "cuda:1"]),
        (0, FOUR, (), "cpu", []),
    ],
)
def test_under_placement_each_process_gets_a_contiguous_share(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    environment: ProcessEnvironment,
    rules: tuple[tuple[str, str], ...],
    device: str,
    share: list[str],
) -> None:
    machine(monkeypatch, gpus)
    choice = choose_device(environment, "auto", "auto", Layout(kind="placement", placement=rules))
    assert choice.device == torch.device(device)
    assert choice.share is not None and choice.share.home.device == choice.device
    assert [str(place.device) for place in choice.share.places if place.device.type == "cuda"] == share
    assert choose_device(environment, "auto", "auto", Layout()).share is None
    if share:
        assert f"{len(share)} GPUs from {share[0]} on, batch and loss on {device}" in str(choice.decisions[0])


@pytest.mark.parametrize(
    ("gpus", "environment", "layout", "requested", "devices"),
    [
        (8, FOUR, Layout(kind="placement"), "auto", ["cuda:7", "cuda:6"]),
        (3, ALONE, Layout(kind="placement", placement=(("a", "cuda:1"),)), "auto", ["cuda:1", "cuda:0", "cuda:2"]),
        (2, FOUR, Layout(kind="placement"), "auto", ["cuda:1"]),
        (3, ALONE, Layout(kind="data_parallel"), "auto", ["cuda:0", "cuda:1", "cuda:2"]),
        (3, ALONE, Layout(kind="data_parallel"), "cpu", ["cpu"]),
        (0, ALONE, Layout(kind="placement"), "auto", ["cpu"]),
        (4, FOUR, Layout(dp_replicate=4), "auto", ["cuda:3"]),
        (4, FOUR, None, "auto", ["cuda:3"]),
    ],
)
def test_the_devices_of_a_process_begin_with_its_home(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    environment: ProcessEnvironment,
    layout: Layout | None,
    requested: str,
    devices: list[str],
) -> None:
    machine(monkeypatch, gpus)
    choice = choose_device(environment, requested, "auto", layout)
    assert [str(device) for device in choice.devices] == devices


def test_a_device_outside_of_the_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8)
    layout = Layout(kind="placement", placement=(("a", "cuda:2"),))
    with pytest.raises(LayoutError, match="names device 'cuda:2', and this process has cuda:0, cuda:1, cpu:0"):
        choose_device(FOUR, "auto", "auto", layout)


def test_without_nccl_gpus_speak_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 4, nccl=False)
    choice = choose_device(FOUR, "auto", "auto")
    assert choice.backend == "gloo"
    assert "built without NCCL" in str(choice.decisions[1])


def test_one_process_needs_no_backend() -> None:
    choice = choose_device(ALONE, "cpu", "auto")
    assert [decision.what for decision in choice.decisions] == ["device cpu"]
    start(ALONE, choice, timeout_seconds=10)
    assert not dist.is_initialized()
    stop()


@pytest.mark.parametrize(
    ("gpus", "nccl", "environment", "requested", "asked", "said"),
    [
        (0, True, FOUR, "cuda", "auto", "--device cpu"),
        (0, True, FOUR, "auto", "nccl", "NCCL serves GPUs only"),
        (4, False, FOUR, "auto", "nccl", "built without NCCL"),
        (4, True, FOUR, "auto", "mpi", "built without MPI"),
        (2, True, FOUR, "auto", "nccl", "4 processes of this host share 2 GPUs and NCCL takes one process a GPU"),
        (2, True, replace(FOUR, launcher="allranks"), "auto", "nccl", "share 2 GPUs"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    nccl: bool,
    environment: ProcessEnvironment,
    requested: str,
    asked: str,
    said: str,
) -> None:
    machine(monkeypatch, gpus, nccl=nccl)
    with pytest.raises(ConfigError, match=said) as caught:
        choose_device(environment, requested, asked)
    assert "\n" not in str(caught.value)


def test_the_device_comes_before_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    machine(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(backend, "prove_growth", lambda device: Decision(f"tried {device}", "segments are to grow"))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", order.append)
    monkeypatch.setattr(backend, "open_store", lambda *_, **__: HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: order.append((name, options["timeout"])))
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    choice = choose_device(FOUR, "auto", "auto")
    started = start(FOUR, choice, timeout_seconds=77)
    assert [one.what for one in started.decisions] == [*(one.what for one in choice.decisions), "tried cuda:3"]
    assert order[:2] == ["expandable_segments:True", torch.device("cuda:3")]
    assert [(name, timeout.total_seconds()) for name, timeout in order[2:]] == [("cuda:nccl,cpu:gloo", 77)]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=" + os.environ["GLOO_SOCKET_IFNAME"]
    stop()
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    order.clear()
    start(ALONE, choose_device(ALONE, "auto", "auto"), timeout_seconds=77)
    assert order == [torch.device("cuda:0")]


SEEN = replace(FOUR, launcher="openmpi", world_size=2, rank=0, local_rank=0, local_world_size=2)


@pytest.mark.parametrize(
    ("gpus", "uuids", "name", "because"),
    [
        (1, ("a", "b"), "nccl", "no two processes have the same GPU"),  # a wrapper has set CUDA_VISIBLE_DEVICES
        (1, ("a", "a"), "gloo", "several on one save no memory and are slow; start one a GPU"),
        (2, ("a", "b"), "nccl", "no two processes have the same GPU"),
        (2, ("a", "a"), "gloo", "processes of this world share GPUs"),
    ],
)
def test_processes_that_see_few_gpus_compare_them(
    monkeypatch: pytest.MonkeyPatch, gpus: int, uuids: tuple[str, str], name: str, because: str
) -> None:
    """What a launcher shows of GPUs is alike where tasks share one, and where each has its own."""
    machine(monkeypatch, gpus)
    store, begun = HashStore(), list[str]()
    for free in ("take_device", "keep_memory"):
        monkeypatch.setattr(backend, free, lambda _: None)
    monkeypatch.setattr(backend, "carry_messages", lambda _: lambda: None)
    monkeypatch.setattr(backend, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(backend, "uuids_of", lambda _: [uuids[0]])
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: begun.append(backend))
    choice = choose_device(SEEN, "auto", "auto")
    assert choice.unsettled
    with ThreadPoolExecutor() as pool:
        other = pool.submit(share_gpus, store, [uuids[1]], 2, 30)
        started = start(SEEN, choice, timeout_seconds=77)
        assert other.result() == (name == "gloo")
    assert begun == ["cuda:nccl,cpu:gloo" if name == "nccl" else "gloo"]
    assert (started.backend, started.unsettled, started.device) == (name, False, choice.device)
    assert [one.what for one in started.decisions] == [
        f"device {choice.device}",
        f"backend {name}",
        f"interface {choice.interface}",
    ]
    assert because in started.decisions[1].because
    assert os.environ.get("NCCL_SOCKET_IFNAME") == (f"={choice.interface}" if name == "nccl" else None)
    stop()


@pytest.mark.parametrize(
    ("environment", "asked"),
    [(FOUR, "auto"), (replace(FOUR, launcher="allranks"), "auto"), (replace(SEEN, own_device=True), "auto")]
    + [(SEEN, asked) for asked in ("nccl", "gloo")],
)
def test_where_it_is_known_nobody_asks(
    monkeypatch: pytest.MonkeyPatch, environment: ProcessEnvironment, asked: str
) -> None:
    machine(monkeypatch, 1)
    assert not choose_device(environment, "auto", asked).unsettled
    machine(monkeypatch, 0)
    assert not choose_device(SEEN, "auto", "auto").unsettled


def test_between_hosts_nccl_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variable would win over the administrator's file, and over the interfaces of InfiniBand."""
    told: list[str | None] = []
    machine(monkeypatch, 4)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name in ("take_device", "keep_memory"):
        monkeypatch.setattr(backend, name, lambda _: None)
    monkeypatch.setattr(backend, "open_store", lambda *_, **__: HashStore())
    monkeypatch.setattr(backend, "check_reachable", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: told.append(os.environ.get("NCCL_SOCKET_IFNAME")))
    two_hosts = replace(FOUR, world_size=8, num_nodes=2)
    for environment in (two_hosts, replace(two_hosts, interface="lo")):
        start(environment, choose_device(environment, "auto", "auto"), timeout_seconds=77)
        assert "GLOO_SOCKET_IFNAME" in os.environ
        stop()
    assert told == [None, "=lo"]


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"


def test_gpus_that_torch_cannot_use_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(TOO_OLD)

    machine(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    choice = choose_device(ALONE, "auto", "auto")
    monkeypatch.setattr(backend, "keep_memory", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"sees 8 GPU\(s\) and cannot use them: The NVIDIA .* 11040\); update"
    ) as told:
        start(ALONE, choice, timeout_seconds=10)
    assert "\n" not in str(told.value) and str(told.value).endswith("or take --device cpu")
    # What a device that can be used says of itself is left as it is: others know memory that has run out.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too old"):
        take_device(choice.device)


def test_a_device_alone_is_taken_without_a_word_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", order.append)
    monkeypatch.setattr(allocator, "keep_heap", lambda: order.append("heap"))
    take_device(torch.device("cpu"))
    take_device(torch.device("cuda", 2))
    assert order == [torch.device("cuda:2")]


def test_a_process_on_the_cpu_keeps_its_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(allocator, "keep_heap", lambda: kept.append("kept"))
    environment = ProcessEnvironment("environment", 0, 0, 1, 1)
    start(environment, choose_device(environment, "cpu", "auto"), timeout_seconds=10)
    assert kept == ["kept"]


@pytest.mark.distributed
def test_processes_start_with_our_timeout_and_interface() -> None:
    def work() -> Any:
        import torch
        import torch.distributed as dist

        from allranks.launching.environment import read_environment
        from allranks.parallel.backend import choose_device, start, stop

        environment = read_environment(os.environ)
        choice = choose_device(environment, "cpu", "auto")
        start(environment, choice, timeout_seconds=17)
        value = torch.ones(1) * environment.rank
        dist.all_reduce(value)
        assert dist.group.WORLD is not None
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        try:
            raise KeyError
        except KeyError:
            stop()  # does nothing beside an error: NCCL would wait for what its peers have not joined
        found = value.item(), timeout, os.environ["GLOO_SOCKET_IFNAME"] == choice.interface, dist.is_initialized()
        stop()
        return (*found, dist.is_initialized(), "GLOO_SOCKET_IFNAME" in os.environ)

    assert launch(work, nproc=3) == [(3.0, 17.0, True, True, False, False)] * 3


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_failing_rank_does_not_wait_for_its_collectives(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def work() -> None:
        import torch
        import torch.distributed as dist

        from allranks.launching.environment import read_environment
        from allranks.parallel.backend import choose_device, start, stop

        environment = read_environment(os.environ)
        start(environment, choose_device(environment, "cpu", "auto"), timeout_seconds=600)
        group = dist.new_group()
        dist.barrier()
        try:
            if environment.rank == 0:
                pending = dist.all_reduce(torch.ones(1), group=group, async_op=True)
                raise ValueError(f"{pending} never comes to an end")
            __import__("time").sleep(600)
        finally:
            stop()

    if method == "spawn":
        because = StartMethod("spawn", Decision("workers are spawned", "the test says so"))
        monkeypatch.setattr("allranks.surviving.agent.choose_start_method", lambda environ: because)
    with pytest.raises(ValueError, match="never comes to an end"):
        launch(work, nproc=2)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="the names of threads are read in /proc")
def test_the_end_of_a_ddp_module_after_stop_waits_for_nobody() -> None:
    def work() -> tuple[int, int]:
        import torch

        from allranks.launching.environment import read_environment
        from allranks.parallel.backend import choose_device, start, stop

        def gloos_threads() -> int:
            names = [(place / "comm").read_text() for place in Path("/proc/self/task").iterdir()]
            return sum("gloo" in name for name in names)

        environment = read_environment(os.environ)
        start(environment, choose_device(environment, "cpu", "auto"), timeout_seconds=60)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        before = gloos_threads()
        stop()
        del model  # the group's destructor would wait for these threads, holding the lock that they may need
        return before, gloos_threads()

    for before, after in launch(work, nproc=2):
        assert before == after > 0


@pytest.mark.distributed
def test_a_rank_that_never_comes_is_an_error_of_ours() -> None:
    port = free_port()

    def work() -> str:
        from allranks.errors import ProcessError
        from allranks.launching.environment import ProcessEnvironment
        from allranks.parallel.backend import choose_device, start

        rank = int(os.environ["RANK"])
        of_three = ProcessEnvironment("environment", rank, rank, 3, 3, master_addr="127.0.0.1", master_port=port)
        try:
            start(of_three, choose_device(of_three, "cpu", "auto"), timeout_seconds=3)
        except ProcessError as error:
            return str(error)
        return ""

    for said in launch(work, nproc=2):
        assert f"127.0.0.1:{port}, but gloo did not start" in said
        assert "\n" not in said


def test_a_taken_port_is_said_by_start() -> None:
    from allranks.parallel.store import listen

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        environment = replace(FOUR, rank=0, local_rank=0, launcher="environment", master_port=port)
        with pytest.raises(ProcessError, match=f"127.0.0.1:{port}"):
            start(environment, choose_device(environment, "cpu", "auto"), timeout_seconds=5)
    stop()
