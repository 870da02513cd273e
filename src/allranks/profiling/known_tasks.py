"""What a plan needs of a Task, kept under what is known of it before its dataset is built: one JSON file each.

`ProfileCache` asks for the shapes of a batch, and so for the dataset, whose making may take minutes. This one asks for
no more than the model's outline: a start finds here what an earlier one traced. An entry is void when a source file has
changed that was loaded when it was made; that data behind the same code has another shape is not noticed.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allranks.durable import replacing
from allranks.model_profile import ModelProfile
from allranks.profiling.cache import cache_folder, drop_oldest, loaded_stamps, unchanged, with_digest

FAULT_SECONDS: Final = 86400.0
"""So long a trace that failed is not tried again: a day, because what it failed by may be no file of code."""


@final
class KnownTask(BaseModel):
    """An entry.

    Attributes:
        files: source file -> its stamp.
        profiles: by precision; order, sample_seconds: of the dataset, as `FirstBatches` has them.
        fault: why there are no profiles, in one line; "" where there are. made: when, in Unix seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    files: dict[str, str]
    profiles: dict[str, ModelProfile] = {}
    order: str = ""
    sample_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    fault: str = ""
    made: float


def find_known(key: str) -> KnownTask | None:
    """The entry of `key`; None where there is none, its code has changed, or it cannot be read."""
    try:
        entry = KnownTask.model_validate_json(_path(key).read_bytes())
    except (OSError, ValidationError):
        return None
    sound = entry.key == key and all(with_digest(profile) == profile for profile in entry.profiles.values())
    fresh = not entry.fault or 0 <= time.time() - entry.made < FAULT_SECONDS
    return entry if sound and fresh and unchanged(entry.files) else None


def keep_known(
    key: str, profiles: dict[str, ModelProfile], order: str = "", sample_seconds: float = 0.0, fault: str = ""
) -> KnownTask:
    """Write an entry for the code that is loaded now, and return it.

    Without a key, or where it cannot be written, it is not: the next start makes it again.
    """
    entry = KnownTask(
        key=key,
        files=loaded_stamps(),
        profiles=profiles,
        order=order,
        sample_seconds=sample_seconds,
        fault=fault,
        made=time.time(),
    )
    path = _path(key)
    with suppress(OSError):
        if not key:
            return entry
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(entry.model_dump_json(), encoding="utf-8")
        drop_oldest(path.parent)
    return entry


def _path(key: str) -> Path:
    return cache_folder().with_name("tasks") / f"{key}.json"
