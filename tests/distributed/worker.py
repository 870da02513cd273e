"""The processes behind `pool`: a host that has torch imported and forks workers, and workers that run case after case.

Run as `python -m tests.distributed.worker`. The host reads lines `COUNT ADDRESS` from its standard input and forks
COUNT workers that connect to the unix socket ADDRESS; when its standard input ends it kills what it forked and
leaves.
"""

import ctypes
import faulthandler
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

import cloudpickle
import psutil
import torch
import torch._dynamo  # the first optimizer step would import it: half a second in every worker
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel
from torch._C._distributed_c10d import TCPStore

import allranks.stepping.session  # noqa: F401  # what most cases import: half a second in every worker
from tests.distributed.messages import Done, Failed, Setup

GROUP_TIMEOUT = timedelta(minutes=5)  # the parent's own timeout of a case is the one that counts
PR_SET_PDEATHSIG = 1


def run_case(payload: bytes) -> Done | Failed:
    """Call the pickled (function, arguments) under the rules of the test suite: warnings are errors."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function, arguments = cloudpickle.loads(payload)
            return Done(cloudpickle.dumps(function(*arguments)))
    except BaseException as error:
        moment = time.monotonic()
        text = "".join(traceback.format_exception(error))
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:
            return Failed(moment, None, text)
        return Failed(moment, pickled, text)


def forget(environment: dict[str, str]) -> None:
    """Put back what one case may have changed for the next."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)


def join_group(setup: Setup, connection: Connection) -> None:
    """Join the pool's gloo group; rank 0 owns the store and says where it listens."""
    if setup.rank == 0:
        store = TCPStore("127.0.0.1", 0, setup.world_size, is_master=True, wait_for_workers=False)
        connection.send(store.port)
    else:
        store = TCPStore("127.0.0.1", setup.store_port, setup.world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=setup.rank, world_size=setup.world_size, timeout=GROUP_TIMEOUT)


def serve(address: str) -> None:
    """One worker's life: connect, be set up, run cases until the parent is gone."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        connection = Connection(client.detach())
    connection.send(os.getpid())
    setup: Setup = connection.recv()
    os.environ.update(setup.environment)
    with open(setup.stack_file, "w") as stack_file:
        faulthandler.register(signal.SIGUSR2, file=stack_file, all_threads=False)
        if setup.group:
            join_group(setup, connection)
        environment = dict(os.environ)
        while True:
            outcome = run_case(connection.recv_bytes())
            forget(environment)
            connection.send(outcome)


def fork_worker(address: str) -> None:
    """Fork one worker; returns in the host only."""
    if os.fork():
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        serve(address)
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent is gone
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    """The host: fork what is asked for until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers: the kernel reaps them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes our standard input
    threads = torch.get_num_threads()
    assert threads == 1, f"a fork with {threads} OpenMP threads hangs: start the host with OMP_NUM_THREADS=1"
    for line in iter(sys.stdin.readline, ""):
        count, address = line.split(" ", 1)
        for _ in range(int(count)):
            fork_worker(address.rstrip("\n"))
    for child in psutil.Process().children():  # not by their numbers: those of workers that ended are others' by now
        child.kill()
    try:
        os.wait()  # with SIGCHLD ignored: returns, with an error, once every worker is gone
    except ChildProcessError:
        os._exit(0)  # taking torch's modules apart would take a second


if __name__ == "__main__":
    main()
