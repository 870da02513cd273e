"""What messages take, told to the ledger: of FSDP2's units, of rows that an update changed, between stages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from allranks.parallel.spread import Spread
from allranks.parallel.stage_transport import Sent
from allranks.parallel.step_record import find_units
from allranks.rehearsal import Category
from allranks.rehearsing.ledger import Ledger
from allranks.rehearsing.places import UPDATE
from allranks.rehearsing.world import replaced

_RECEIVED: tuple[Category, str] = ("activations", "the pipeline")
"""What the tensors are that a stage receives into, and whose."""
_OF_METHOD: dict[str, Category] = {
    "unshard": "communication",  # the message that gathers
    "wait_for_unshard": "gathered",  # what it is taken apart into
    "post_backward": "communication",
}


def watch_units(spread: Spread, ledger: Ledger) -> None:
    """From now on the ledger knows what their own memory is for; units and rows live as long as the rehearsal."""
    for which in spread.modules:
        for group, unit, _ in find_units(spread.bare(which), which):
            for name, category in _OF_METHOD.items():
                setattr(group, name, _inside(getattr(group, name), ledger, category, unit, group))
    rows = spread.row_shards
    if rows is not None:
        rows.gather = _inside(rows.gather, ledger, "communication", UPDATE)  # type: ignore[method-assign]


@contextmanager
def receiving(ledger: Ledger) -> Iterator[None]:
    """Inside, the ledger knows what stages of a pipeline receive into, by torch's schedules and by ours."""
    from torch.distributed.pipelining import stage as torch_stage  # brings torch's compiler, which takes a second

    with ExitStack() as stack:
        for owner, name in ((torch_stage, "_make_tensor_from_meta"), (Sent, "empty")):
            stack.enter_context(replaced(owner, name, _inside(getattr(owner, name), ledger, *_RECEIVED)))
        yield


def _inside(
    method: Callable[..., Any], ledger: Ledger, category: Category, unit: str, group: Any = None
) -> Callable[..., Any]:
    """`group`: the unit's, whose gradients have a place while they are reduced."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if method.__name__ == "post_backward":
            _mark_gradients(group, ledger, unit)
        if method.__name__ == "wait_for_unshard" and group._all_gather_result is not None and ledger.now is not None:
            ledger.now.waits.append((len(ledger.now.messages), ledger.now.flops))
        outer = ledger.place, ledger.gathering
        ledger.place, ledger.gathering = (category, unit), unit if method.__name__ == "unshard" else ""
        try:
            return method(*args, **kwargs)
        finally:
            ledger.place, ledger.gathering = outer

    return call


def _mark_gradients(group: Any, ledger: Ledger, unit: str) -> None:
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        for gradient in (None if whole is None else whole.grad, parameter.unsharded_accumulated_grad):
            if gradient is not None:
                ledger.mark(gradient, "gradients", unit)
