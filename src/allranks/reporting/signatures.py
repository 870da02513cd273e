"""What distributed training prints when it dies or hangs, what usually caused it, and what to do: one table.

Collected from public threads of the projects whose messages these are, and from programs that a test has fail.
"""

import re

from allranks.reporting.model_signatures import OF_MODELS
from allranks.reporting.signature import Signature

E1 = Signature(
    "E1",
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)",
    "NCCL waited in vain in {2} (number {1}, {3} values)",
    "compare number, operation and size of all ranks' logs",
)
SIGNATURES: tuple[Signature, ...] = (
    E1,
    Signature(
        "E1b",
        r"Timed out waiting (\d+)ms for (recv|send) operation to complete",
        "over gloo a rank waited {1} ms in vain for another one ({2})",
        "see which rank made another call, stands still or has ended: compare the last lines of all ranks' logs; "
        "`py-spy dump --pid` shows where one stands",
        known="reproduced",
    ),
    Signature(
        "E2",
        r"Detected mismatch between collectives on ranks",
        "the ranks made different collectives, or the same one with other shapes",
        "compare the two call sites that the message names; look for calls that depend on the rank, and for batches of "
        "unequal size",
    ),
    Signature(
        "E2b",
        r"Received data size doesn't match expected size",
        "over gloo two ranks sent each other messages of unequal size: other collectives, or the same one with other "
        "shapes",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names both calls; look for calls that depend on the rank, and for batches of "
        "unequal size",
        known="reproduced",
    ),
    Signature(
        "E3",
        r"watchdog got stuck for \d+ seconds",
        "NCCL's own monitor could not run: Python's lock or a call of CUDA's was held",
        "no collective is at fault: look at the stacks of that rank for compiled code that keeps Python's lock",
    ),
    Signature(
        "E4",
        r"exitcode\s*:\s*-9\b|was killed by SIGKILL|\boom_kill event|\bOOMKilled\b",
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
        known="reproduced",
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
        r"client socket has (?:timed out after .* trying to connect to|failed to connect to any network address of) "
        r"\(([^,]+), (\d+)\)",
        "nobody answered at {1}, port {2}",
        "see from this host whether that name leads to the right address (not 127.0.1.1, not the login node) and "
        "whether a firewall lets the port through: `getent hosts {1}`, `nc -vz {1} {2}`",
    ),
    Signature(
        "E10b",
        r"waiting for clients\. (\d+)/(\d+) clients joined",
        "of {2} processes {1} came to the start",
        "see on the other hosts whether their processes were started, with the same WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT, and what ended them before they came so far",
        known="reproduced",
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
        "E12",
        r"NCCL INFO ncclCommInit\w* .*Init COMPLETE",
        "NCCL has started, and nothing comes behind it in this log",
        "where the job hangs there, with GPUs at 100 % and nothing sent, it is mostly transfers between GPUs past the "
        "processor: NCCL_P2P_DISABLE=1 tells; if that helps, turn ACS and the IOMMU off in the BIOS "
        "(`nvidia-smi topo -p2p r`)",
        known="general",
        last=True,
    ),
    Signature(
        "E13",
        r"CUDA out of memory.* (\S+ (?:[KMG]iB|bytes)) is allocated by PyTorch.* "
        r"(\S+ (?:[KMG]iB|bytes)) is reserved by PyTorch but unallocated",
        "the GPU's memory is full: torch has {1} in use, and {2} beside it in pieces",
        "lower train.micro_batch, recompute activations (layout.recompute) or shard more",
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
    *OF_MODELS,
    Signature(
        "E25",
        r"unexpected EOF(?! while looking for)|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer"
        r"|central directory|might be corrupted|SafetensorError: Error while deserializing|EOFError: Ran out of input",
        "a file of a checkpoint is cut short or damaged",
        "go back to the newest whole one; `allranks checkpoint verify RUN` finds it",
    ),
    Signature(
        "E26",
        r"(?:Missing|Unexpected) key.*(module\.|_orig_mod\.|_fsdp_wrapped_module)",
        "the names in the checkpoint carry a wrapper's prefix ({1})",
        "strip the prefix from the names, or load into the model wrapped as it was saved",
        known="reproduced",
    ),
    Signature(
        "E27",
        r"Didn't find an RNG file for process",
        "the checkpoint was written by another number of processes",
        "continue with as many, or accept other random numbers; in allranks they are a function of the position",
    ),
    Signature(
        "E28",
        r"world.?size .*(?:not|must be) divisible|not divisible by .*world.?size",
        "something does not divide by the number of processes",
        "pad it (a vocabulary) or change the number of processes; `allranks plan` shows the arithmetic",
        known="reproduced",
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
        r"(?:(?:loss|grad_?norm)(?:/\w+)?\W{1,4}(?:is )?(?:tensor\()?nan\b|found (?:nan|inf)\b.*(?:loss|grad)|"
        r"(?<!no )(?<!not )(?<!without )(?<!any )non-finite|returned nan values in its|grad_?norm\W{1,4}inf\b|"
        # What a best loss begins with is no loss.
        r"^(?!.*(?:best|min|lowest)\w*\W?\w*loss).*loss(?:/\w+)?\W{1,4}(?:is )?(?:tensor\()?inf\b)",
        "the loss or a gradient is no number any more",
        "find the first step and rank in the journal; the same data again tells data and numerics from hardware",
        known="reproduced",
        flags=re.IGNORECASE,
    ),
    Signature(
        "E31",
        r"Rank \d+ has different values for step",
        "ranks resumed from different steps",
        "resume all of them from one checkpoint; see whether a host reads another directory",
    ),
    Signature(
        "E32b",
        r"DataLoader worker \(pid[^)]*\) is killed by signal: Killed",
        "a process that loads data was killed by SIGKILL, most often by the kernel for want of memory",
        "`dmesg | grep -i oom` tells; lower data.workers: each has its own copy of what a dataset makes in it",
        known="reproduced",
    ),
    Signature(
        "E32",
        r"[Cc]an(?:not|'t) pickle|Can't get local object|[Tt]oo many open files|DataLoader (?:worker|timed out)",
        "loading of data failed in a process of its own",
        "set data.workers=0 to see the dataset's own error; raise `ulimit -n`; what a dataset holds must be picklable",
        known="reproduced",
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
