"""Which workers train: the largest world that a config takes, and who is left over."""

import pytest

from allranks.config import Config, resolve_config
from allranks.errors import LayoutError
from allranks.training.seats import seat_workers


def config_of(layout: str, *overrides: str) -> Config:
    return resolve_config(task_defaults={}, toml=None, overrides=("train.steps=9", *overrides), layout=layout)


@pytest.mark.parametrize(
    ("layout", "batch", "workers", "seats"),
    [
        ("ddp", 64, (2, 2, 2), (2, 2, 2)),
        ("tp=2,dp_shard=*", 64, (1, 1, 1), (1, 1, 0)),
        ("tp=2,dp_shard=*", 64, (1, 1, 1, 1), (1, 1, 1, 1)),
        ("tp=4,dp_shard=*", 64, (2, 2, 2), (2, 2, 0)),
        ("tp=2,dp_shard=*", 64, (3, 3, 3), (3, 3, 2)),
        ("tp=2,dp_shard=*", 64, (3,), (2,)),
        ("dp_shard=*,ep=4", 64, (1,) * 7, (1,) * 4 + (0,) * 3),
        ("dp_shard=2", 64, (1, 1, 1), (1, 1, 0)),
        ("pp=2,dp_shard=*", 8, (2, 2, 2), (2, 2, 0)),
        ("ddp", 8, (4, 4, 4), (4, 4, 0)),
        ("ddp", 3, (1, 1, 1, 1), (1, 1, 1, 0)),
        ("hsdp", 8, (3, 3, 3), (3, 3, 0)),
        ("hsdp", 64, (4, 4, 2), (4, 4, 0)),
        ("tp=2,dp_shard=*", 64, (1, 3, 2), (1, 3, 2)),
    ],
)
def test_the_largest_world_is_filled_from_the_first_host_on(
    layout: str, batch: int, workers: tuple[int, ...], seats: tuple[int, ...]
) -> None:
    assert seat_workers(config_of(layout, f"train.global_batch={batch}"), workers) == seats


def test_where_no_number_fits_the_line_has_the_numbers() -> None:
    with pytest.raises(LayoutError) as caught:
        seat_workers(config_of("tp=4,dp_shard=*"), (1, 1, 1))
    told = str(caught.value)
    assert told.startswith("the layout does not take 3 worker(s), nor fewer: dp_replicate(1) * ")
    assert told.endswith("tp(4) * cp(1) * pp(1) = 4 * n, but the world has 3 processes"), told
