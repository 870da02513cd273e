"""The processes of a run as one value: where this one stands, on which device, and how it speaks to the others."""

import json
import socket
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from allranks.data.random_keys import note_devices
from allranks.launching.environment import ProcessEnvironment
from allranks.layout import Layout
from allranks.parallel.backend import DeviceChoice
from allranks.parallel.initial import Source
from allranks.parallel.mesh import Mesh, build_mesh
from allranks.parallel.waiting import wait_alike


@dataclass(frozen=True)
class Processes:
    """This process among the others.

    Attributes:
        environment: as the launcher told it.
        choice: device, backend and interface, with because.
        mesh: the layout over the ranks.
        agreement: a process group of its own for the per-step vector; None for one process.
        host: the ranks of this host, among which initial values are streamed; None for one process.
    """

    environment: ProcessEnvironment
    choice: DeviceChoice
    mesh: Mesh
    agreement: dist.ProcessGroup | None
    host: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.environment.rank

    @property
    def size(self) -> int:
        """Processes in the world."""
        return self.environment.world_size

    @property
    def device(self) -> torch.device:
        """Where this process computes; batch and loss, where that is on several."""
        return self.choice.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that this process computes on, `device` first."""
        return self.choice.devices

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All processes; None for one."""
        return None if self.size == 1 else dist.group.WORLD

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that see other samples than this one, and hold the same part of the model; None where it is one."""
        return self.mesh.data_group

    def host_source(self) -> Source:
        """Initial values come from the first process of this host (law 5)."""
        leader = self.rank if self.host is None else min(dist.get_process_group_ranks(self.host))
        return Source(self.host, leader, self.rank == leader)

    def first_source(self) -> Source:
        """Initial values come from rank 0 of the world (an own loop builds its model on every rank)."""
        return Source(self.world_group, 0, self.rank == 0)

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; collective."""
        return value if self.size == 1 else share(value, self.device)

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()


def share(value: Any, device: torch.device) -> Any:
    """Rank 0's JSON value, on every rank of the default group, by way of `device`; collective."""
    first = dist.get_rank() == 0
    text = json.dumps(value).encode() if first else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, 0)
    data = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if first:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, 0)
    return json.loads(bytes(data.cpu().tolist()))


def gather_processes(environment: ProcessEnvironment, choice: DeviceChoice, layout: Layout) -> Processes:
    """The Processes of a world whose backend runs; collective. From here on `seed_all` seeds this process's devices."""
    note_devices([device.index for device in choice.devices if device.type == "cuda"])
    mesh = replace(build_mesh(layout, choice.device.type), share=choice.share)
    if environment.world_size == 1:
        return Processes(environment, choice, mesh, None, None)
    agreement = dist.new_group(group_desc="agreement")
    host = _host_group(environment, choice.device)
    wait_alike()
    return Processes(environment, choice, mesh, agreement, host)


def _host_group(environment: ProcessEnvironment, device: torch.device) -> dist.ProcessGroup | None:
    """The ranks of this host. They are asked, because hosts may have unequally many, and ranks may go round the hosts.

    Where a launcher counts hosts otherwise than they are, a host falls into several groups: never two hosts into one.
    """
    mine = torch.tensor([environment.node_rank, zlib.crc32(socket.gethostname().encode())], device=device)
    everyones = [torch.zeros_like(mine) for _ in range(environment.world_size)]
    dist.all_gather(everyones, mine)
    hosts = [tuple(one.tolist()) for one in everyones]
    if len(set(hosts)) == 1:
        return dist.group.WORLD
    found: dist.ProcessGroup | None = None
    for host in sorted(set(hosts)):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        group = dist.new_group(ranks)
        found = group if environment.rank in ranks else found
    return found
