"""One rank in the place of all stages of its pipeline: what they hand on never leaves it (`crossings.py`)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from allranks.layout import Layout
from allranks.parallel import stages
from allranks.parallel.mesh import Mesh
from allranks.rehearsing.world import replaced


@contextmanager
def walking() -> Iterator[None]:
    """Inside, a rank whose model is spread runs every stage; the cut into stages is the layout's."""
    with ExitStack() as stack:
        for name in ("Pipeline", "Transport"):
            stack.enter_context(replaced(stages, name, _of_all_stages(vars(stages)[name])))
        yield


def _of_all_stages(kind: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        own = next(arg for arg in args if isinstance(arg, Mesh)).coordinate("pp")
        with replaced(Layout, "stage_rank", lambda layout, stage: own):
            return kind(*args)

    return make
