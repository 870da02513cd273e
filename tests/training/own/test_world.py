"""What `join` returns: where this process stands, its groups, and its end."""

from pathlib import Path

import pytest
import torch

import allranks
from allranks.errors import LayoutError
from allranks.failure import read_failures
from allranks.recorded import run_recorded
from allranks.training.own.ground import JOINED
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, loss_of, sgd


def test_groups_by_axis(pool: Pools) -> None:
    def case() -> tuple[object, ...]:
        import torch.distributed as dist

        with allranks.join(layout="dp_replicate=2,dp_shard=2") as world:
            sums = []
            for axis in ("dp_replicate", "dp_shard"):
                value = torch.tensor(float(world.rank))
                dist.all_reduce(value, group=world.group(axis))
                sums.append(value.item())
            with pytest.raises(LayoutError, match="no axis 'tp' in layout dp_replicate=2,dp_shard=2"):
                world.group("tp")
            return world.rank, world.local_rank, world.size, str(world.device), sums

    assert pool(4).run(case) == [
        (0, 0, 4, "cpu", [2.0, 1.0]),
        (1, 1, 4, "cpu", [4.0, 1.0]),
        (2, 2, 4, "cpu", [2.0, 5.0]),
        (3, 3, 4, "cpu", [4.0, 5.0]),
    ]


def test_the_ranks_that_share_layers_speak_over_their_own_group(pool: Pools, tmp_path: Path) -> None:
    """What a user adds to tensor parallel by hand: here the largest activation of a whole layer, cut over two ranks."""

    def case(folder: str) -> tuple[list[int], bool]:
        import torch.distributed as dist

        with allranks.join(layout="dp_replicate=2,tp=2", precision="float64", run=folder) as world:
            group = world.group("tp")
            torch.manual_seed(3)
            whole = torch.randn(6, 4)
            largest = whole.tensor_split(2)[dist.get_rank(group)].max()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            return dist.get_process_group_ranks(group), bool(largest == whole.max())

    found = pool(4).run(case, str(tmp_path / "run"))
    assert found == [([0, 1], True), ([0, 1], True), ([2, 3], True), ([2, 3], True)]


def test_gather_trains_a_loss_that_couples_samples(pool: Pools, tmp_path: Path) -> None:
    """Each sample is compared with all of its micro-step: the same on one process and on three, fillers included."""

    def case(folder: str) -> list[torch.Tensor]:
        with allranks.join(precision="float64", run=folder) as world:
            torch.manual_seed(1)
            net = Net()
            model = world.parallelize(net)
            optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
            for batch in world.stream(Samples(), global_batch=8, micro_steps=3):
                mine = model(batch["x"]).flatten(1)
                everyone = world.gather(mine)
                loss = (mine @ everyone.t()).logsumexp(dim=1).sum()
                world.backward(loss, targets=len(mine))
                world.step(optimizer)
            return [parameter.detach() for parameter in net.parameters()]

    (expected,) = pool(1).run(case, str(tmp_path / "one"))
    for found in pool(3).run(case, str(tmp_path / "three")):
        assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in zip(expected, found, strict=True))


def test_leaving_frees_everything(tmp_path: Path) -> None:
    world = allranks.join(run=tmp_path / "run")
    assert len(JOINED) == 1
    world.close()
    world.close()  # harmless
    assert not JOINED
    assert not (tmp_path / "run").exists()  # a world in which nothing is trained leaves nothing


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(KeyError), allranks.join():
        raise KeyError("the user's")
    assert not JOINED


def test_an_error_is_noted_until_this_process_joins_again(tmp_path: Path) -> None:
    """Whoever reads the note would else take it for the cause of a later crash."""
    noted = []

    def work() -> None:
        with pytest.raises(KeyError), allranks.join():
            raise KeyError("the user's")
        noted.extend(read_failures(tmp_path))
        with allranks.join():
            assert not read_failures(tmp_path)

    assert run_recorded(work, (), rank=0, folder=tmp_path) == 0
    assert [failure.message for failure in noted] == ['KeyError: "the user\'s"']


def test_a_model_alone_keeps_its_own_class(pool: Pools, tmp_path: Path) -> None:
    def case() -> tuple[str, bool]:
        with allranks.join(layout="dp_shard=2", precision="float64", run=str(tmp_path / "run")) as world:
            net = Net()
            model = world.parallelize(net)
            optimizer = world.optimizer(model, sgd)
            for batch in world.stream(Samples(), global_batch=10, steps=1):
                world.backward(loss_of(model, batch), targets=count(batch))
                stepped = world.step(optimizer)
            return type(model).__name__, model is net and stepped

    assert pool(2).run(case) == [("FSDPNet", True)] * 2
