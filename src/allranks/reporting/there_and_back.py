"""The orders of pipelines whose stages go through the ranks there and back: zbv and dualpipev.

A rank has two stages: turn 0 on the way there, turn 1 on the way back.
"""

from collections import deque
from typing import Literal, final

Kind = Literal["forward", "backward", "weight"]
Visit = tuple[Kind, int, int]
"""(kind, turn, micro-step); "backward" is the half that makes the input's gradient, "weight" the other one."""

THERE, BACK = 0, 1


@final
class _Order:
    """What a rank runs, written down word by word; the micro-steps of each kind and turn count from 0."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self._begun = {"forward": [0, 0], "backward": [0, 0]}
        self._waiting: deque[tuple[int, int]] = deque()

    def forward(self, turn: int) -> None:
        self._begin("forward", turn)

    def backward(self, turn: int) -> None:
        """Of the input; the weights' half waits."""
        self._waiting.append((turn, self._begin("backward", turn)))

    def whole(self, turn: int) -> None:
        """Both halves."""
        number = self._begin("backward", turn)
        self.visits.append(("weight", turn, number))

    def weight(self, turn: int | None = None) -> None:
        """The half that waits longest, of this turn or of any; nothing where none waits."""
        for waits in self._waiting:
            if turn in (None, waits[0]):
                self._waiting.remove(waits)
                self.visits.append(("weight", *waits))
                return

    def _begin(self, kind: Literal["forward", "backward"], turn: int) -> int:
        number = self._begun[kind][turn]
        self._begun[kind][turn] += 1
        self.visits.append((kind, turn, number))
        return number


def order_zbv(rank: int, pp: int, num_micro_steps: int) -> list[Visit]:
    """ZB-V (2405.15362, section 4.2) as torch's ScheduleZBVZeroBubble lays it down, for 2 * pp micro-steps at least.

    Forwards until the first is back; then a backward of each turn for a forward of each, both halves at once; at the
    end the halves of inputs first, which others wait for, and then those of weights.
    """
    order = _Order()
    first = 2 * (pp - rank) - 1
    for _ in range(first):
        order.forward(THERE)
    for _ in range(rank):
        order.forward(BACK)
        order.forward(THERE)
    for _ in range(pp - rank):
        order.forward(BACK)
        order.whole(BACK)
    for number in range(num_micro_steps - pp):
        if first + rank + number < num_micro_steps:
            order.forward(THERE)
        order.whole(THERE)
        order.forward(BACK)
        order.whole(BACK)
    for _ in range(rank):
        order.backward(THERE)
        order.backward(BACK)
    for _ in range(pp - rank):
        order.backward(THERE)
        order.weight(THERE)
    for turn in (BACK, THERE):
        for _ in range(rank):
            order.weight(turn)
    return order.visits


def order_dualpipev(rank: int, pp: int, num_micro_steps: int) -> list[Visit]:
    """DualPipeV (DeepSeek-V3 2412.19437, section 3.2.1, cut in half) as torch's ScheduleDualPipeV lays it down.

    A forward and a backward of different micro-steps run together in the middle; they are written one after the other.
    """
    order, left = _Order(), pp - rank - 1
    for _ in range(2 * left):
        order.forward(THERE)
    for _ in range(rank + 1):
        order.forward(THERE)
        order.forward(BACK)
    for _ in range(left):
        order.backward(BACK)
        order.weight()
        order.forward(BACK)
    for _ in range(num_micro_steps - 2 * pp + rank + 1):
        order.forward(THERE)
        order.whole(BACK)
        order.forward(BACK)
        order.whole(THERE)
    for _ in range(left):
        order.whole(BACK)
        order.forward(BACK)
        order.whole(THERE)
    _drain_dualpipev(order, rank, left)
    return order.visits


def _drain_dualpipev(order: _Order, rank: int, left: int) -> None:
    """The last backwards; from the middle on their halves of weights wait until there is nothing else to do."""
    for number in range(2 * (rank + 1)):
        split = number >= 2 * ((rank + 1) // 2) + (1 - rank % 2)
        (order.backward if split else order.whole)(BACK if number % 2 == 0 else THERE)
    for _ in range(left):
        order.weight()
        order.backward(THERE)
    for _ in range(rank + 1):
        order.weight()
