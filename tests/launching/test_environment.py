"""Who started this process, for every launcher, and what is refused."""

from typing import Any

import pytest

from allranks.errors import ConfigError
from allranks.launching.environment import ALONE, ProcessEnvironment, read_environment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "4321",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "head"}
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "4321"}
NODE: dict[str, Any] = {"node_rank": 1, "num_nodes": 2, "master_addr": "head", "master_port": 4321}


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no scontrol


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}, ALONE),  # in the batch script itself, not in a step
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        (
            TORCHRUN,
            ProcessEnvironment("torchrun", 5, 1, 8, 4, **NODE, restart_count=3, agent_store=True),
        ),
        (
            TORCHRUN | {"ALLRANKS_AGENT": "1234", "ALLRANKS_LAYOUT": "fsdp", "TORCHELASTIC_USE_AGENT_STORE": "False"},
            ProcessEnvironment("allranks", 5, 1, 8, 4, **NODE, restart_count=3, layout="fsdp"),
        ),
        (SRUN | TORCHRUN, ProcessEnvironment("torchrun", 5, 1, 8, 4, **NODE, restart_count=3, agent_store=True)),
        (PLAIN, ProcessEnvironment("environment", 1, 0, 2, 1, **NODE)),  # Kubeflow: one process a pod
        (
            PLAIN | {"MASTER_ADDR": "localhost"},
            ProcessEnvironment("environment", 1, 1, 2, 2, master_addr="localhost", master_port=4321),
        ),
        (
            PLAIN | {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            ProcessEnvironment("environment", 7, 3, 8, 4, **NODE),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment("environment", 0, 0, 1, 1)),
        (SRUN | PLAIN, ProcessEnvironment("environment", 1, 0, 2, 1, **NODE)),
        (
            SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "4321"},
            ProcessEnvironment("slurm", 6, 2, 7, 3, **NODE),
        ),
        (
            SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "4321", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"},
            ProcessEnvironment("slurm", 6, 2, 7, 3, **NODE, own_device=True),
        ),
        (
            MPIRUN | {"MASTER_PORT": "4321"},
            ProcessEnvironment("openmpi", 3, 3, 4, 4, master_addr="127.0.0.1", master_port=4321),
        ),
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, ALONE),
        (MPIEXEC | {"MASTER_PORT": "4321"}, ProcessEnvironment("pmi", 3, 1, 4, 2, **NODE)),
        (
            PLAIN | {"GLOO_SOCKET_IFNAME": "eth7"},
            ProcessEnvironment("environment", 1, 0, 2, 1, **NODE, interface="eth7"),
        ),
    ],
)
def test_every_launcher_is_recognised(environ: dict[str, str], expected: ProcessEnvironment) -> None:
    assert read_environment(environ) == expected


def test_srun_meets_at_its_first_host_on_a_port_of_the_step() -> None:
    found = read_environment(SRUN)
    assert found.master_addr == "gpu08"
    assert 15000 <= found.master_port < 30000
    assert read_environment(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).master_port == (
        found.master_port
    )
    assert read_environment(SRUN | {"SLURM_STEP_ID": "1"}).master_port != found.master_port


@pytest.mark.parametrize(("nodeid", "local"), [("0", 4), ("1", 4), ("2", 3)])
def test_slurms_tasks_per_node(nodeid: str, local: int) -> None:
    environ = SRUN | {
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_NODEID": nodeid,
    }
    assert read_environment(environ).local_world_size == local


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "but MASTER_ADDR is not set"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head"}, "but MASTER_PORT is not set"),
        (PLAIN | {"RANK": "2"}, "rank is 2, but must be at least 0 and below the world size, 2"),
        (PLAIN | {"RANK": "one"}, "RANK='one' is not a number"),
        (PLAIN | {"RANK": "-1"}, "RANK='-1' is not a number"),
        (PLAIN | {"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        (PLAIN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local rank is 2"),
        (PLAIN | {"LOCAL_RANK": "1"}, "LOCAL_RANK are set, but LOCAL_WORLD_SIZE is not set"),
        (PLAIN | {"LOCAL_WORLD_SIZE": "3"}, "local world size is 3"),
        (PLAIN | {"MASTER_PORT": "70000"}, "master port is 70000"),
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, "but LOCAL_RANK is not set"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank is 4"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}, "but SLURM_PROCID is not set"),
        (SRUN | {"SLURM_NODEID": "2"}, "has no entry for SLURM_NODEID=2"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "mpirun -x MASTER_ADDR"),
        ({name: value for name, value in MPIEXEC.items() if name != "MASTER_ADDR"}, "mpiexec -genv MASTER_ADDR"),
    ],
)
def test_missing_and_contradictory_variables_are_refused_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(environ)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
