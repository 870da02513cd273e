"""What stands beside the figures."""

import json
from datetime import datetime

import torch

from allranks.benchmarking.machine import describe_machine, has_gpu, num_devices
from allranks.process_environment import num_cores


def test_it_is_one_json_object() -> None:
    about = describe_machine("cpu")
    assert json.loads(json.dumps(about)) == about
    assert (about["torch"], about["cores"], about["gpus"]) == (torch.__version__, num_cores(), [])
    assert datetime.fromisoformat(str(about["date"])).tzinfo is not None


def test_processes_go_on_gpus_where_there_are_some() -> None:
    assert num_devices("cpu") == num_cores() >= 1
    assert not has_gpu("cpu")
    assert has_gpu("auto") == torch.cuda.is_available()
    assert num_devices("auto") == (torch.cuda.device_count() or num_cores())
