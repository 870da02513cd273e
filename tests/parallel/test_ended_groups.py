"""A model that outlives its process group does not make its process stand still."""

from pathlib import Path

import pytest

from allranks.surviving.launch import launch


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_model_may_outlive_its_group(tmp_path: Path) -> None:
    """Where torch's own end of the groups is all that is done, this stands still within its first three rounds."""

    def end_often() -> int:
        import gc
        import os

        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from allranks.parallel.ended_groups import destroy_groups

        for number in range(20):
            place = f"file://{tmp_path}/{number}"
            dist.init_process_group("gloo", init_method=place, rank=int(os.environ["RANK"]), world_size=2)
            model = DistributedDataParallel(torch.nn.Linear(8, 8))
            model(torch.ones(4, 8)).sum().backward()
            value = torch.ones(100)
            dist.all_reduce(value)
            destroy_groups()
            assert not dist.is_initialized()
            del model, value
            gc.collect()
        destroy_groups()  # of none
        return number

    assert launch(end_often, nproc=2) == [19, 19]
