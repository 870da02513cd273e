"""Cluster: the devices that a plan is for, and the links between them. Values only; nothing here looks at a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True, slots=True)
class FixedSeconds:
    """What a step on a processor takes besides its kernels and its bytes, however small its tensors are. Seconds.

    Attributes:
        operation: of one operation, forward or backward: its way through Python, torch and autograd.
        micro_step: of one forward and backward besides its operations.
        step: of one optimizer step besides its micro-steps.
        unit_message: of gathering or reducing one sharded unit, besides the collective.
        move: of one collective between layers that tp cuts, besides the collective.
        hop: of one message between stages, besides the message.
        parting: of one operation whose backward a schedule makes in two parts, besides what it takes in one.
    """

    operation: float = 0.0
    micro_step: float = 0.0
    step: float = 0.0
    unit_message: float = 0.0
    move: float = 0.0
    hop: float = 0.0
    parting: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or, on a machine without any, one process's share of the CPU).

    Attributes:
        name: as in a cluster string, "a100-80g".
        label: for people, "NVIDIA A100 80 GB SXM".
        memory_bytes: what is built in; what a process may use of it is planning's business.
        memory_bandwidth: bytes/s, as the vendor prints it or as measured.
        peak_flops: precision ("bfloat16", "float16", "float32", "float64", "float8", "float4") -> dense FLOP/s.
        matmul_flops: precision -> the best measured rate of a matrix product, FLOP/s; absent where nobody measured.
        measured: whether the figures were measured on this very machine (`doctor --calibrate`).
        matmul_shapes: precision -> ((rows, inner, columns, FLOP/s), ...): products (rows x inner) @ (inner x columns).
        kernel_seconds: the least time of one kernel in a row of them, its launch included; None where nobody measured.
        update_rate: parameters/s of a fused AdamW step with float32 state; None where nobody measured.
        pass_rates: ((bytes of a tensor, bytes/s read and written), ...) of elementwise operations: what a cache holds
            goes faster; () where nobody measured, as `doctor --calibrate` does on processors alone.
        context_bytes: of a processor's process before it has a model: the interpreter, torch, the backend; None for
            a GPU, and where nobody knows.
        cores: of a processor, what one process has of it: below 1 where processes share a core.
        fixed: of a processor: what its small programs took besides their kernels and bytes.
        host_memory_bytes: its share of the host's memory in the vendor's node; None where nobody says.
        source: where the figures come from.
    """

    name: str
    label: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    measured: bool = False
    source: str = ""
    matmul_shapes: Mapping[str, tuple[tuple[int, int, int, float], ...]] = field(default_factory=dict)
    kernel_seconds: float | None = None
    update_rate: float | None = None
    pass_rates: tuple[tuple[float, float], ...] = ()
    context_bytes: float | None = None
    cores: float | None = None
    fixed: FixedSeconds = field(default_factory=FixedSeconds)
    host_memory_bytes: float | None = None

    @property
    def kind(self) -> str:
        """As torch names it: "cpu" or "cuda"."""
        return "cpu" if self.name.startswith("cpu") else "cuda"


@final
@dataclass(frozen=True, slots=True)
class Link:
    """What carries messages between devices.

    Attributes:
        bandwidth: bytes/s that one device can send (and at the same time receive).
        latency_seconds: of one hop.
        measured: collective -> group size -> ((bytes, seconds), ...) in rising order of bytes: measured times of
            all_reduce, all_gather, reduce_scatter, all_to_all (bytes: of the whole, unsharded tensor) and send
            (bytes sent); {} where nobody measured.
        source: where the figures come from.
    """

    name: str
    bandwidth: float
    latency_seconds: float
    measured: Mapping[str, Mapping[int, tuple[tuple[float, float], ...]]] = field(default_factory=dict)
    source: str = ""


@final
@dataclass(frozen=True, slots=True)
class Correction:
    """What `num_runs` runs on one machine took over what was calculated for them: `measured`, and within limits."""

    factor: float
    measured: float
    num_runs: int


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        nodes, devices_per_node: how many.
        inside: the link between devices of one `domain`; between: the link between domains.
        domain: devices that `inside` joins: a node's, or more (72 in a GB200 NVL72 rack).
        host_memory_bytes, host_bandwidth: of a node, and between a device and its host in bytes/s; None where nobody
            says it of this cluster (`memory_of_host` then has the vendor's).
        device_hour_price, currency, device_watts: None unless the user's file or a dated source gives them.
        price_source: where the price and the watts come from.
        machine: where it stands for the machine at hand, that machine and a digest of the figures; else "".
        corrections: by which the seconds of a family of layouts are multiplied there; "" is any other family.
        storage_bandwidth: bytes/s that all processes of a node together write checkpoints with; None where unknown.
        notes: what was assumed where nothing was said, each with its because, for the user to read once.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    inside: Link
    between: Link
    domain: int
    host_memory_bytes: float | None = None
    host_bandwidth: float | None = None
    device_hour_price: float | None = None
    currency: str = "USD"
    device_watts: float | None = None
    price_source: str = ""
    notes: tuple[str, ...] = ()
    machine: str = ""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    storage_bandwidth: float | None = None

    @property
    def num_devices(self) -> int:
        """Devices in the cluster."""
        return self.nodes * self.devices_per_node

    @property
    def memory_of_host(self) -> float | None:
        """Bytes of a node: as the cluster says, else its devices' shares in the vendor's node; None where unknown."""
        if self.host_memory_bytes is not None or self.device.host_memory_bytes is None:
            return self.host_memory_bytes
        return self.devices_per_node * self.device.host_memory_bytes

    @property
    def takes_vendors_host(self) -> bool:
        """Whether `memory_of_host` is the vendor's: somebody else's nodes may have another."""
        return self.host_memory_bytes is None and self.device.host_memory_bytes is not None
