"""The modules of a world: one that is trained, spread once, and called through what parallelize returned."""

from pathlib import Path

import torch
from torch import nn

import allranks
from tests.distributed.pool import Pools
from tests.stepping.test_evaluation_mode import Cached
from tests.training.own.cases import Block, Net, Samples, built, count, everything, loss_of, refusal, sgd


def test_a_second_spreading_is_refused() -> None:
    with allranks.join() as world:
        net = Net()
        assert refusal(lambda: world.parallelize(net, blocks="blocks.*")) == (
            "TaskError: world.parallelize(blocks=) is the string 'blocks.*': give a list, ['blocks.*']"
        )
        model = world.parallelize(net)
        frozen = Net().requires_grad_(False)
        assert [refusal(lambda again=again: world.parallelize(again)) for again in (net, model, net.blocks)] == [  # type: ignore[misc]
            f"TaskError: world.parallelize({name}): it, or a part of it, is spread already: call it once, on the whole "
            "model"
            for name in ("Net", "Net", "Sequential")
        ]
        assert "this world trains Net already: put both into one nn.Module, or freeze this one" in refusal(
            lambda: world.parallelize(nn.Linear(2, 2))
        )
        assert world.parallelize(frozen) is frozen
        assert refusal(lambda: world.parallelize(nn.Linear(2, 2, device="meta").requires_grad_(False))).endswith(
            "it has parameters on the meta device, without values"
        )
        assert "expected an nn.Module" in refusal(lambda: world.parallelize("Net"))  # type: ignore[arg-type]
        assert refusal(lambda: world.optimizer(frozen, sgd)) == (
            "TaskError: Net is not the model of this world: pass what world.parallelize(model) returned"
        )


def test_one_that_is_wrapped_already_is_refused(pool: Pools) -> None:
    def case() -> list[str]:
        with allranks.join() as world:
            wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            model = world.parallelize(Net())
            return [refusal(lambda: world.parallelize(wrapped)), refusal(lambda: world.parallelize(model))]

    for first, second in pool(2).run(case):
        assert first.endswith("DDP or FSDP is around it already: pass the bare module")
        assert "is spread already" in second


def test_every_rank_gets_the_values_of_the_first(pool: Pools) -> None:
    def case(layout: str) -> dict[str, torch.Tensor]:
        with allranks.join(layout=layout) as world:
            world.parallelize(built(world.rank))
            world.optimizer(world._ground.models.trained.modules[""], sgd)
            return everything(world)

    expected = dict(built(0).named_parameters())
    whole, sharded = pool(2).run(case, "ddp"), pool(2).run(case, "dp_shard=2")
    for name, value in expected.items():
        assert all(torch.equal(found[name], value) for found in whole)
        halves = [found[name] for found in sharded]
        assert torch.equal(halves[0] if value.dim() == 0 else torch.cat(halves), value)


def test_a_loss_computed_past_ddp_is_refused(pool: Pools, tmp_path: Path) -> None:
    def case() -> str:
        def loop() -> None:
            with allranks.join(precision="float64", run=str(tmp_path / "run")) as world:
                net = Net()
                optimizer = world.optimizer(world.parallelize(net), sgd)
                for batch in world.stream(Samples(), global_batch=10):
                    world.backward(loss_of(net, batch), targets=count(batch))
                    world.step(optimizer)

        return refusal(loop)

    assert all("computed without calling the model that world.parallelize returned" in s for s in pool(2).run(case))


def test_evaluation_puts_every_mode_and_buffer_back() -> None:
    with allranks.join() as world:
        net = Net()
        net.register_buffer("forwards", torch.zeros(()))
        world.parallelize(net)
        frozen, other = net.blocks[1], net.blocks[0]
        assert isinstance(frozen, Block) and isinstance(other, Block)
        frozen.eval()
        with world._ground.models.evaluating():
            assert not any(part.training for part in net.modules())
            net.get_buffer("forwards").add_(1)
        assert net.get_buffer("forwards").item() == 0
        assert net.training and not frozen.training and not frozen.drop.training
        assert other.drop.training


def test_evaluation_tells_modules_of_both_ways() -> None:
    """A cache that train() drops must not be measured again after the next step."""

    with allranks.join() as world:
        net = Cached(2, 2)
        world.parallelize(net)
        with world._ground.models.evaluating():
            net(torch.ones(1, 2))
            assert net.cache is not None
        assert net.training and net.cache is None
