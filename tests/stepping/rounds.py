"""A round of a session's sentinels, without a Trainer around it."""

from allranks.stepping.alike import everyones
from allranks.stepping.session import Session
from allranks.verdict import Verdict


def hold_round(session: Session, step: int) -> dict[str, Verdict]:
    """By name, what the sentinels that compare the ranks find after `step` steps; collective."""
    rounds, processes = session.posted.comparing, session.processes
    told = everyones({one.name: one.tell() for one in rounds}, processes.world_group, processes.device)
    found = {one.name: one.judge([rank[one.name] for rank in told], step) for one in rounds}
    return {name: verdict for name, verdict in found.items() if verdict is not None}
