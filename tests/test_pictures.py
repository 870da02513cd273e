"""The pictures of the collectives show what the real calls do."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pools
from tools.pictures import COLLECTIVES, draw

DOCS = Path(__file__).parents[1] / "docs"
SEVEN = ("broadcast", "all-reduce", "gather", "all-gather", "reduce-scatter", "all-to-all", "barrier")


def call(name: str) -> list[int]:
    """In a worker: what this rank has after the real call, with the numbers of the picture."""
    collective, rank = COLLECTIVES[name], dist.get_rank()
    given = torch.tensor(collective.before[rank] or [0] * len(collective.before[0]), dtype=torch.int64)
    got: Any = given.clone()
    if name == "broadcast":
        dist.broadcast(got, 0)
    elif name == "all-reduce":
        dist.all_reduce(got)
    elif name == "gather":
        parts = [torch.empty_like(given) for _ in range(3)] if rank == 0 else None
        dist.gather(given, parts, dst=0)
        got = torch.cat(parts) if parts else torch.empty(0)
    elif name == "all-gather":
        parts = [torch.empty_like(given) for _ in range(3)]
        dist.all_gather(parts, given)
        got = torch.cat(parts)
    elif name == "reduce-scatter":
        got = torch.empty(1, dtype=torch.int64)
        dist.reduce_scatter(got, list(given.split(1)))
    elif name == "all-to-all":
        dist.all_to_all_single(got, given)
    else:
        dist.barrier()
        got = torch.empty(0)
    found: list[int] = got.tolist()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_picture_shows_what_the_real_call_does(pool: Pools, name: str) -> None:
    assert pool(3).run(call, name) == [list(after) for after in COLLECTIVES[name].after]


def sections() -> dict[str, str]:
    """Heading, in small letters -> what stands below it on the page of the collectives."""
    _, *found = re.split(r"^## (.*)$", (DOCS / "explanation" / "collectives.md").read_text(), flags=re.MULTILINE)
    return dict(zip((heading.lower() for heading in found[::2]), found[1::2], strict=True))


def test_the_page_has_all_seven_and_a_picture_of_each() -> None:
    assert set(COLLECTIVES) == set(SEVEN)
    for name in SEVEN:
        pictures = re.findall(r"!\[(.*?)\]\((.*?)\)", sections()[name])
        assert pictures == [(f"{name}: {COLLECTIVES[name].words}", f"../assets/{name}.svg")]
        assert (DOCS / "assets" / f"{name}.svg").read_text() == draw(name)
        text = sections()[name].partition(".svg)")[2].strip()
        assert len(text.split()) > 10, f"{name}: nothing says what it is for"


def test_it_is_drawn_with_its_numbers() -> None:
    picture = draw("all-to-all")
    assert 'aria-label="all-to-all: every rank gives a part to every rank"' in picture
    assert all(f">{'  '.join(map(str, row))}<" in picture for row in COLLECTIVES["all-to-all"].after)
    assert draw("gather").count(">nothing<") == 2
