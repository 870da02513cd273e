"""What is known of the cut model without a comparison with the whole one: what was seen of its first forwards.

Where they are compared and differ, the same may be why.
"""

from allranks.errors import LayoutError
from allranks.parallel.spread import Spread
from allranks.parallel.tensor_uses import describe_uses
from allranks.stepping.alike import everyones
from allranks.verdict import Decision

UNCOMPARED = "the cut model was not compared with the whole one"
BESIDE = (
    "What is made of other blocks (a sum around a block, as in x + block(x), or an item() of their output) is nothing "
    "where these belong to another stage: put it into the block, or name blocks that hold it in hints().blocks, or cut "
    "the model elsewhere with hints().split_before"
)

_UNFOLLOWED = (
    "what blocks write in place into lists or objects that other stages or the loss read is not followed: "
    "allranks verify with fewer blocks compares"
)


def pass_uncompared(spread: Spread, because: str) -> Decision:
    """That nothing is compared, and why; collective along pp.

    Raises:
        LayoutError: on every rank, where the forward uses what another stage of a pipeline has and does not send, or a
            part of a parameter outside of its module.
    """
    wrong = find_wrong(spread)
    if wrong:
        raise LayoutError(f"layout {spread.mesh.layout} does not compute what one process computes: {wrong}. {BESIDE}")
    refuse_use(spread, f"{UNCOMPARED}: {because}")
    return Decision(UNCOMPARED, because if spread.stages is None else f"{because}; {_UNFOLLOWED}")


def find_wrong(spread: Spread) -> str:
    """What the ranks of a pipeline have seen in the first forward, the first of them; collective along pp."""
    return "" if spread.stages is None else _first_told(spread.stages.pipeline.wrong, spread)


def refuse_use(spread: Spread, because: str) -> None:
    """Refuse the use of a part outside of its module, if there was one; collective along pp.

    Args:
        because: what else there is to say of the comparison.

    Raises:
        LayoutError: on every rank, with line, parameter and next move.
    """
    if use := _first_told(describe_uses(spread), spread):
        raise LayoutError(f"{use}; {because}")


def _first_told(mine: str, spread: Spread) -> str:
    if spread.stages is None:
        return mine
    return next(filter(None, everyones(mine, spread.stages.group, spread.device)), "")
