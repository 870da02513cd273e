"""The one code path that applies a layout."""

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from allranks.layout import Layout
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS
from tests.parallel.spreads import spread


def test_one_process_gets_the_users_own_module() -> None:
    built = MODELS["tied"]()
    found = spread(lambda: built)
    assert found.modules == {"": built}
    assert found.bare() is built
    assert (found.divisor, found.decisions) == (1, ())
    found.synchronise(last=True)
    found.reduce_scalars()
    found.reshard()
    found.expect_unused()
    assert found.modules == {"": built}


def look(kind: str, layout: Layout, options: dict[str, Any]) -> Any:
    found = spread(MODELS[kind], layout, **options)
    wrapped = {which: isinstance(module, DistributedDataParallel) for which, module in found.modules.items()}
    bare = not isinstance(found.bare(), DistributedDataParallel)
    return wrapped, bare, found.divisor, [str(decision) for decision in found.decisions]


@pytest.mark.distributed
def test_who_reduces_gradients(pool: Pools) -> None:
    assert pool(2).run(look, "mlp", Layout(dp_replicate=2), {})[0] == ({"": True}, True, 2, [])
    assert pool(2).run(look, "mlp", Layout(dp_replicate=2), {"ddp": False})[0] == ({"": False}, True, 2, [])
    units = "2 units and the root of the model are gathered one at a time, because"
    cut = pool(2).run(look, "sharing", Layout(dp_shard=2), {})[0]
    assert cut == ({"": False}, True, 2, [f"{units} these modules repeat: blocks.0+blocks.2, blocks.1"])
    hinted = pool(2).run(look, "sharing", Layout(dp_shard=2), {"blocks": ["first", "last"]})[0]
    assert hinted[3] == [f"{units} hints().blocks names them: first, last"]
    whole = pool(2).run(look, "tied", Layout(dp_shard=2), {"blocks": ["embedding"]})[0]
    assert whole[3] == ["the model is gathered as one unit, because no block stands apart from the rest"]
