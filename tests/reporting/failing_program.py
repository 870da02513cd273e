"""Programs that fail as distributed training does: `python -m torch.distributed.run failing_program.py NAME`."""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))
CPU = torch.device("cpu")
BATCH = torch.ones(2, 4)


class OneHeadUnused(nn.Module):
    """Has a layer that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(batch)  # type: ignore[no-any-return]


class OneLayerTwice(OneHeadUnused):
    """Goes twice through a layer under reentrant recomputation."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            batch = checkpoint(self.used, batch, use_reentrant=True)
        return self.unused(batch)  # type: ignore[no-any-return]


class Samples(Dataset[torch.Tensor]):
    """Whose reading kills the process that reads, or never ends; `held` is what it holds beside."""

    def __init__(self, fault: str = "", held: object = None) -> None:
        self.fault, self.held = fault, held

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "sleep":
            time.sleep(600)
        return torch.ones(2)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def waits_in_vain() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if RANK == 0:
        dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


def too_few_come() -> None:
    TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1))


def labels_of_another_type() -> None:
    nn.functional.cross_entropy(torch.ones(2, 4), torch.ones(2))


def other_collectives() -> None:
    call: Callable[..., Any] = dist.all_reduce if RANK == 0 else dist.all_gather_object
    call(*([torch.ones(4)] if RANK == 0 else [[None, None], "x"]))


def other_sizes() -> None:
    dist.all_reduce(torch.ones(4 if RANK else 400_000))


def killed() -> None:
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def mapped_file_cut_short() -> None:
    if RANK == 1:
        with tempfile.TemporaryFile() as file:
            file.truncate(1 << 16)
            mapped = mmap.mmap(file.fileno(), 1 << 16)
            file.truncate(0)
            print(mapped[5000])
    dist.barrier()


def aborted() -> None:
    if RANK == 1:
        os.abort()
    dist.barrier()


def segmentation_fault() -> None:
    if RANK == 1:
        ctypes.string_at(0)
    dist.barrier()


def an_error_of_one() -> None:
    if RANK == 1:
        raise ValueError("of rank 1")
    dist.barrier()


def nobody_answers() -> None:
    TCPStore("127.0.0.1", 9, 2, is_master=False, timeout=timedelta(seconds=2))


def frozen_beside_trained() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    FullyShardedDataParallel(model, device_id=CPU, use_orig_params=False)


def two_types_in_a_unit() -> None:
    FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()), device_id=CPU)


def unused_parameters() -> None:
    model = DistributedDataParallel(OneHeadUnused())
    for _ in range(2):
        model(BATCH).sum().backward()


def ready_twice() -> None:
    model = DistributedDataParallel(OneLayerTwice(), find_unused_parameters=True)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def outside_of_its_unit_fsdp1() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    model[0](torch.tensor([1]))


def outside_of_its_unit_fsdp2() -> None:
    model = two_layers()
    fully_shard(model)
    model[0](BATCH)


def storage_given_back() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    FullyShardedDataParallel(model, device_id=CPU)
    with torch.no_grad():
        model[0](torch.tensor([1]))


def two_devices() -> None:
    nn.Linear(4, 4)(torch.ones(2, 4, device="meta"))


def scaler_without_gradients() -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)


def scaler_of_float16() -> None:
    model = nn.Linear(4, 4).half()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(BATCH.half()).sum()).backward()
    scaler.unscale_(optimizer)


def two_types_linear() -> None:
    nn.Linear(4, 4)(BATCH.half())


def two_types_norm() -> None:
    nn.functional.layer_norm(BATCH, (4,), torch.ones(4).half())


def two_types_convolution() -> None:
    nn.Conv1d(2, 2, 1)(torch.ones(1, 2, 4).half())


def torn_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.pt"
        torch.save({"a": torch.ones(1000)}, path)
        os.truncate(path, path.stat().st_size // 2)
        torch.load(path, weights_only=True)


def torn_safetensors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        save_file({"a": torch.ones(1000)}, path)
        os.truncate(path, 2000)
        load_file(path)


def wrappers_prefix() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.load_state_dict(DistributedDataParallel(model).state_dict())


def compilers_prefix() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.load_state_dict({f"_orig_mod.{name}": value for name, value in model.state_dict().items()})


def does_not_divide() -> None:
    dist.new_subgroups(group_size=2)


def loss_is_nan() -> None:
    loss = (torch.zeros(1, requires_grad=True) / 0).sum()
    print(f"step 3, loss: {loss}", flush=True)
    raise ValueError("training has diverged")


def gradient_is_nan() -> None:
    with torch.autograd.detect_anomaly():
        (torch.sqrt(torch.zeros(1, requires_grad=True)) * 0).sum().backward()


def norm_is_nan() -> None:
    model = nn.Linear(4, 4)
    (model(BATCH) * float("nan")).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def other_steps() -> None:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(BATCH).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] += RANK
    FullyShardedDataParallel.optim_state_dict(model, optimizer)


def loader_killed() -> None:
    list(DataLoader(Samples("kill"), 2, num_workers=1))


def loader_too_slow() -> None:
    list(DataLoader(Samples("sleep"), 2, num_workers=1, timeout=2))


def loader_of_a_lambda() -> None:
    list(DataLoader(Samples(held=lambda: 0), 2, num_workers=1, multiprocessing_context="spawn"))


def loader_of_a_generator() -> None:
    list(DataLoader(Samples(held=(number for number in range(3))), 2, num_workers=1, multiprocessing_context="spawn"))


def too_many_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(Path(os.devnull).open())


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    globals()[sys.argv[1]]()
