"""What distributed training prints when it dies or hangs, what usually caused it, and what to do: one table.

Collected from public threads of the projects whose messages these are. `known` says how well: "threads" where several
reports agree on cause and remedy; "general" where the wording or the remedy is general knowledge and was not reproduced
here: the answer says so.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, final

Known = Literal["threads", "general"]


@final
@dataclass(frozen=True)
class Signature:
    """One kind of failure.

    Attributes:
        name: E1 ... E33, P1; stays the same over versions. E12, a hang right after NCCL's start, prints nothing.
        pattern: a regular expression for one line.
        what: the failure, in words; `{1}` is the pattern's first group.
        next: what to look at, and what to change.
        known: see above.
        consequence: whether another failure usually came before it, on this rank or on another.
        beside: it says something only beside one of these.
    """

    name: str
    pattern: str
    what: str
    next: str
    known: Known = "threads"
    consequence: bool = False
    beside: tuple[str, ...] = ()
    flags: int = field(default=0, repr=False)

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The pattern, compiled."""
        return re.compile(self.pattern, self.flags)


E1 = Signature(
    "E1",
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)",
    "NCCL waited in vain in {2} (number {1}, {3} values)",
    "compare number, operation and size of all ranks' logs",
)
SIGNATURES: tuple[Signature, ...] = (
    E1,
    Signature(
        "E2",
        r"Detected mismatch between collectives on ranks",
        "the ranks made different collectives, or the same one with other shapes",
        "compare the two call sites that the message names; look for calls that depend on the rank, and for batches of "
        "unequal size",
    ),
    Signature(
        "E3",
        r"watchdog got stuck for \d+ seconds",
        "NCCL's own monitor could not run: Python's lock or a call of CUDA's was held",
        "no collective is at fault: look at the stacks of that rank for compiled code that keeps Python's lock",
    ),
    Signature(
        "E4",
        r"exitcode\s*:\s*-9\b|was killed by SIGKILL",
        "a worker was killed by SIGKILL, most often by the kernel for want of memory",
        "`dmesg | grep -i oom` tells; compare memory of a worker x workers of a host with the host's (or the "
        "container's limit); load checkpoints in shards, lower data.workers or train.micro_batch",
    ),
    Signature(
        "E5",
        r"exitcode\s*:\s*-7\b|\bBus error\b|was killed by SIGBUS",
        "a worker touched memory that is not there: mostly /dev/shm is full, or a mapped file was cut short",
        "look at `df -h /dev/shm`; in a container give it more (docker: --shm-size or --ipc=host; Kubernetes: an "
        "emptyDir of medium Memory), or lower data.workers",
    ),
    Signature(
        "E6",
        r"exitcode\s*:\s*-6\b|was killed by SIGABRT|terminate called after throwing",
        "a worker ended itself (SIGABRT)",
        "look at what it printed before: mostly a timeout of NCCL's, or messages of unequal size over gloo",
        consequence=True,
    ),
    Signature(
        "E7",
        r"exitcode\s*:\s*-11\b|was killed by SIGSEGV|Segmentation fault",
        "compiled code crashed (SIGSEGV)",
        "the stacks in that rank's log name the library; see that all libraries were built for this torch and CUDA",
        known="general",
    ),
    Signature(
        "E8",
        r"error_file: <N/A>",
        "torchrun has not kept the error of the process that failed first",
        "look at that rank's own output, the earliest by time; `allranks train` keeps it",
        consequence=True,
    ),
    Signature(
        "E9",
        r"Address already in use|errno: 98\b|EADDRINUSE",
        "the port is taken, often by a process of the run before",
        "`ss -tlnp` names it: end it, or choose another port (MASTER_PORT, torchrun: --master-port)",
    ),
    Signature(
        "E10",
        r"client socket has timed out after .* trying to connect to \(([^,]+), (\d+)\)",
        "nobody answered at {1}, port {2}",
        "see from this host whether that name leads to the right address (not 127.0.1.1, not the login node) and "
        "whether a firewall lets the port through: `getent hosts {1}`, `nc -vz {1} {2}`",
    ),
    Signature(
        "E11",
        r"ncclSystemError|ncclInternalError",
        "NCCL could not use the network it chose",
        "name the interface (NCCL_SOCKET_IFNAME; not docker0, not virbr0); see that the libraries of InfiniBand or EFA "
        "are in the image; NCCL_DEBUG=INFO says what it tried",
    ),
    Signature(
        "E11b",
        r"Failed to open libibverbs|NET/Socket : Using",
        "NCCL went over plain sockets, without InfiniBand",
        "between hosts that have it, see that its libraries (or EFA's) are in the image; without it this is as it "
        "should be",
        consequence=True,
        beside=("E1", "E11"),  # a run that is well says so, too, under NCCL_DEBUG=INFO
    ),
    Signature(
        "E13",
        r"CUDA out of memory.* (\S+ [KMG]iB) is reserved by PyTorch but unallocated",
        "the GPU's memory is full, and {1} of it is held by torch in pieces",
        "if that is more than a tenth, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; else lower "
        "train.micro_batch, recompute activations (layout.recompute) or shard more",
    ),
    Signature(
        "E13b",
        r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory|Cuda failure 2 'out of memory'"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "the GPU's memory is full",
        "lower train.micro_batch, recompute activations (layout.recompute=full) or shard more; `allranks plan` says "
        "what fits",
    ),
    Signature(
        "E14",
        r"_full_optim_state_dict|_ALLGATHER_BASE.*out of memory|full_state_dict",
        "memory ran out, or was about to, while a whole state was gathered for saving",
        "save in shards instead: allranks does",
        consequence=True,
        beside=("E4", "E13", "E13b"),
    ),
    Signature(
        "E15",
        r"in cross_entropy\b|logits\.float\(\)|lm_head",
        "the error came from the logits",
        "logits take vocabulary x tokens x 4 to 8 bytes: lower train.micro_batch, or use allranks.losses' chunked head",
        consequence=True,
        beside=("E13", "E13b"),
    ),
    Signature(
        "E16",
        r"Must flatten tensors with uniform (requires_grad|dtype)",
        "FSDP1 cannot put parameters of unequal {1} into one flat one",
        "use FSDP2 (--layout fsdp does), or FSDP1's use_orig_params=True",
    ),
    Signature(
        "E17",
        r"Expected to have finished reduction in the prior iteration",
        "some parameters got no gradient in the step before, on some ranks at least",
        "TORCH_DISTRIBUTED_DEBUG=INFO names them; name such modules in hints().optional (or say "
        "world.parallelize(model, find_unused=True)), or let every forward use them",
        known="general",
    ),
    Signature(
        "E18",
        r"marked as ready twice",
        "DDP saw one parameter's gradient twice in a backward",
        "use non-reentrant checkpointing; look for modules that are shared, or forwarded twice before one backward",
        known="general",
    ),
    Signature(
        "E19",
        r"does not seem to reference any FSDP parameters",
        "the optimizer was made before the model was wrapped, so that it trains nothing",
        "make the optimizer from the parameters of the wrapped model",
    ),
    Signature(
        "E20",
        r"'weight' must be 2-D|size mismatch.*\[0\]",
        "a sharded parameter was used outside of its unit, while it was not gathered",
        "call the unit's forward, not a submodule's; keep tied weights in one unit",
    ),
    Signature(
        "E21",
        r"data is not allocated yet|mutable_data",
        "a method other than forward ran on a sharded model, past the hooks that gather its parameters",
        "go through forward, or gather the parameters first (FSDP2: unshard())",
    ),
    Signature(
        "E22",
        r"found (?:at least two|two different) devices|device_map=['\"]auto['\"]",
        "tensors of two devices met in one operation",
        "take the device of a tensor that a forward makes from another one (device=x.device), and move there what was "
        "left behind (.to(x.device), register_buffer); a model that device_map='auto' has spread: give it to allranks "
        "on one device",
        known="general",
    ),
    Signature(
        "E23",
        r"No inf checks were recorded|Attempting to unscale FP16 gradients",
        "the scaler of float16 met gradients that need none",
        "use it with float32 parameters under float16 autocast only; bfloat16 needs no scaler",
    ),
    Signature(
        "E24",
        r"expected scalar type \w+ but found \w+|Expected query, key, and value to have the same dtype",
        "operands have unequal types, often a buffer that mixed precision has not cast",
        "cast that buffer in forward, or keep it float32 on both sides",
    ),
    Signature(
        "E25",
        r"unexpected EOF|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|central directory|might be corrupted",
        "a file of a checkpoint is cut short or damaged",
        "go back to the newest whole one; `allranks checkpoint verify RUN` finds it",
    ),
    Signature(
        "E26",
        r"(?:Missing|Unexpected) key.*(module\.|_orig_mod\.|_fsdp_wrapped_module)",
        "the names in the checkpoint carry a wrapper's prefix ({1})",
        "strip the prefix from the names, or load into the model wrapped as it was saved",
        known="general",
    ),
    Signature(
        "E27",
        r"Didn't find an RNG file for process",
        "the checkpoint was written by another number of processes",
        "continue with as many, or accept other random numbers; in allranks they are a function of the position",
    ),
    Signature(
        "E28",
        r"world size .* not divisible|not divisible by .*world.?size",
        "something does not divide by the number of processes",
        "pad it (a vocabulary) or change the number of processes; `allranks plan` shows the arithmetic",
        known="general",
    ),
    Signature(
        "E29",
        r"an illegal memory access was encountered|NVRM: Xid.*?: (\d+)|\bXid \(",
        "a GPU faulted",
        "the same rank or host twice means hardware: take it out and run `dcgmi diag -r 3`; another one each time "
        "means a kernel: CUDA_LAUNCH_BLOCKING=1 names it",
        known="general",
    ),
    Signature(
        "E30",
        r"(?:\bloss\b\W{1,4}(?:nan|inf)\b|found NaN|non-finite)",
        "the loss or a gradient is no number any more",
        "find the first step and rank in the journal; the same data again tells data and numerics from hardware",
        known="general",
        flags=re.IGNORECASE,
    ),
    Signature(
        "E31",
        r"Rank \d+ has different values for step",
        "ranks resumed from different steps",
        "resume all of them from one checkpoint; see whether a host reads another directory",
    ),
    Signature(
        "E32",
        r"[Cc]annot pickle|[Tt]oo many open files|DataLoader (?:worker|timed out)",
        "loading of data failed in a process of its own",
        "set data.workers=0 to see the dataset's own error; raise `ulimit -n`; what a dataset holds must be picklable",
        known="general",
    ),
    Signature(
        "E33",
        r"terminate called without an active exception",
        "torch ended a thread that still ran and aborted the process, most often behind the script's last line: a DDP "
        "model outlives its process group (pytorch#190489)",
        "what was computed and saved before is whole; drop the model before destroy_process_group(), or let allranks "
        "join and end the group",
    ),
    Signature(
        "P1",
        r"Connection closed by peer|Connection reset by peer|NCCL communicator was aborted|remote process exited",
        "a rank lost another one",
        "look at the rank that ended first",
        consequence=True,
    ),
)
