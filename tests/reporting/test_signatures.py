"""Every signature knows its line, and none takes another's."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.reporting.explain import GENERAL, explain_log
from allranks.reporting.signatures import SIGNATURES

PROGRAM = Path(__file__).with_name("failing_program.py")

# As they were printed; what stands for paths, hosts and numbers is made up.
LINES = {
    "E1": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "E1b": "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "1800000ms for recv operation to complete",
    "E2": "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ...",
    "E2b": "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 400000 vs 4. "
    "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
    "E3": "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring",
    "E4": "  exitcode  : -9 (pid: 3312)",
    "E5": "  exitcode  : -7 (pid: 3312)",
    "E6": "  exitcode  : -6 (pid: 3312)",
    "E7": "  exitcode  : -11 (pid: 3312)",
    "E8": "  error_file: <N/A>",
    "E9": "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "E10": "The client socket has timed out after 60000ms while trying to connect to (node-a.cluster, 29500).",
    "E10b": "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    "E11": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "E11b": "node-a:12:40 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
    "E12": "node-a:12:40 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0 rank 0 nranks 2 cudaDev 0 nvmlDev 0 "
    "busId 1000 commId 0xab12 - Init COMPLETE",
    "E13": "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 60.00 GiB is allocated by PyTorch, "
    "and 9.50 GiB is reserved by PyTorch but unallocated.",
    "E13b": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "E14": '  File "/x/fsdp.py", line 12, in full_state_dict',
    "E15": '  File "/x/functional.py", line 3029, in cross_entropy',
    "E16": "ValueError: Must flatten tensors with uniform requires_grad when `use_orig_params=False`",
    "E17": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    "E18": "Expected to mark a variable ready only once. Parameter at index 3 has been marked as ready twice",
    "E19": "ValueError: The optimizer does not seem to reference any FSDP parameters.",
    "E20": "RuntimeError: 'weight' must be 2-D",
    "E21": "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.",
    "E22": "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "E22b": "RuntimeError: Tensor on device cpu is not on the expected device meta!",
    "E23": "AssertionError: No inf checks were recorded for this optimizer.",
    "E24b": "RuntimeError: expected scalar type Long but found Float",
    "E24": "RuntimeError: expected scalar type Half but found Float",
    "E25": "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    "E26": 'RuntimeError: Missing key(s) in state_dict: "module.0.weight"',
    "E27": "Didn't find an RNG file for process 3, if you are resuming a training that wasn't launched",
    "E28": "ValueError: world size (6) is not divisible by tensor parallel size (4)",
    "E29": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "E30": "step 120 loss: nan",
    "E31": "RuntimeError: Rank 3 has different values for step: 12.0",
    "E32b": "RuntimeError: DataLoader worker (pid 4411) is killed by signal: Killed.",
    "E32": "RuntimeError: DataLoader worker (pid(s) 4411) exited unexpectedly",
    "E33": "terminate called without an active exception",
    "P1": "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:5123",
}


def test_every_signature_has_a_line_here() -> None:
    assert [one.name for one in SIGNATURES] == list(LINES)


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_its_signatures(name: str) -> None:
    first = next(one for one in SIGNATURES if one.regex.search(LINES[name]))
    assert first.name == name


@pytest.mark.parametrize(
    "line",
    [
        "step 120/1000  12%  loss 2.3456  1.2k samples/s  ETA 3 min 05 s",
        "  exitcode  : 1 (pid: 3312)",
        "info: the validation information is inf-initialised",
        "NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "[rank0] ProcessGroupNCCL environments: NCCL version: 2.28.9, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 480",
        "loaded 2000 samples from /data/nan/x.bin",
        "best_val_loss=inf, starting training",
        "{'min_loss': inf}",
        "epoch 0 | best loss: inf",
        "lowest_loss = tensor(inf)",
        "INFO gradient check: no non-finite values",
        "found NaN in 12 rows of column 'age'; they are dropped",
        "job.sh: line 41: unexpected EOF while looking for matching `\"'",
        'model = AutoModel.from_pretrained(name, device_map="auto")',
        "",
    ],
)
def test_what_a_healthy_run_prints_is_nobodys(line: str) -> None:
    assert [one.name for one in SIGNATURES if one.regex.search(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.0}",
        "grad_norm=inf",
        "found NaN in local grad norm in backward pass before data-parallel communication collective",
        "gradients are non-finite",
        "step 3 loss: inf",
        "train_loss=inf",
        "best loss: nan",
        "epoch 1 loss=inf, best 2.5",
        "loss/train: tensor(inf)",
    ],
)
def test_a_loss_that_is_no_number_is_one_that_is_trained_with(line: str) -> None:
    assert [one.name for one in SIGNATURES if one.regex.search(line)] == ["E30"]


@pytest.mark.parametrize(
    "line",
    [
        "torch.AcceleratorError: CUDA error: out of memory",
        "Cuda failure 2 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_runs_out_in_a_library_is_memory_that_runs_out(line: str) -> None:
    assert "E13b" in [one.name for one in SIGNATURES if one.regex.search(line)]


def test_words_use_groups_that_there_are() -> None:
    for one in SIGNATURES:
        used = {int(number) for number in re.findall(r"\{(\d)\}", one.what + one.next)}
        assert not used or max(used) <= one.regex.groups, one.name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("The client socket has failed to connect to any network address of (node1, 29500).", "E10"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed",
            "E4",
        ),
        ("    reason: OOMKilled", "E4"),
        ("RuntimeError: expected scalar type Float but found Long", "E24b"),
        ("RuntimeError: expected scalar type Float but found BFloat16", "E24"),
    ],
)
def test_other_words_of_the_same(line: str, name: str) -> None:
    assert next(one for one in SIGNATURES if one.regex.search(line)).name == name


REAL = {
    "waits_in_vain": "E1b",
    "too_few_come": "E10b",
    "labels_of_another_type": "E24b",
    "other_collectives": "E2",
    "other_sizes": "E2b",
    "killed": "E4",
    "mapped_file_cut_short": "E5",
    "aborted": "E6",
    "segmentation_fault": "E7",
    "an_error_of_one": "E8",
    "port_taken": "E9",
    "nobody_answers": "E10",
    "frozen_beside_trained": "E16",
    "two_types_in_a_unit": "E16",
    "unused_parameters": "E17",
    "ready_twice": "E18",
    "outside_of_its_unit_fsdp1": "E20",
    "outside_of_its_unit_fsdp2": "E20",
    "storage_given_back": "E21",
    "two_devices": "E22b",
    "scaler_without_gradients": "E23",
    "scaler_of_float16": "E23",
    "two_types_linear": "E24",
    "two_types_norm": "E24",
    "two_types_convolution": "E24",
    "torn_file": "E25",
    "torn_safetensors": "E25",
    "wrappers_prefix": "E26",
    "compilers_prefix": "E26",
    "does_not_divide": "E28",
    "loss_is_nan": "E30",
    "gradient_is_nan": "E30",
    "norm_is_nan": "E30",
    "other_steps": "E31",
    "loader_killed": "E32b",
    "loader_too_slow": "E32",
    "loader_of_a_lambda": "E32",
    "loader_of_a_generator": "E32",
    "too_many_files": "E32",
}
"""A function of failing_program.py -> the signature that its log has to have first but for consequences."""


def fail_under_torchrun(function: str, log: Path) -> None:
    """Run it under stock torchrun, and keep in `log` all that is printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3" if "divide" in function else "2"]
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if function == "other_collectives" else {}
    with log.open("wb") as file, socket.create_server(("127.0.0.1", 0)) as held:
        own = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        if function == "port_taken":  # by another job of this host; in a worker torch ignores it under torchrun
            own = ["--master-addr", "127.0.0.1", "--master-port", str(held.getsockname()[1])]
        command = [*torchrun, *own, str(PROGRAM), function]
        ended = subprocess.run(
            command, stdout=file, stderr=file, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"} | detail
        )
    assert ended.returncode != 0, log.read_text(errors="replace")


@pytest.mark.distributed
@pytest.mark.sample(36)
@pytest.mark.parametrize("function", REAL)
def test_the_log_of_a_real_run_of_torchruns_is_explained(function: str, tmp_path: Path) -> None:
    log = tmp_path / "torchrun.log"
    fail_under_torchrun(function, log)
    found = explain_log(log)
    kinds, printed = [one.kind for one in found], log.read_text(errors="replace")
    assert REAL[function] in kinds, printed
    assert kinds[0] == REAL[function] or REAL[function] in ("E6", "E8"), printed  # these two are always consequences
    assert all(GENERAL not in one.evidence for one in found if one.kind == REAL[function])


def test_what_is_said_to_be_reproduced_is_a_case_above() -> None:
    reproduced = {one.name for one in SIGNATURES if one.known == "reproduced"}
    assert reproduced <= set(REAL.values())
