"""Which samples workers had in hand when they ended: what comes back with the same samples may be theirs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from allranks.config import Config
from allranks.observing.heartbeat import DATASET, HELD_FROM, HELD_SIZE, HELD_STEP

SHOWN = 16


@final
@dataclass(frozen=True, slots=True)
class InHand:
    """What one worker was about.

    Attributes:
        step: the optimizer step under way, from 1, or the one whose samples were being loaded.
        first: its first position in the order of samples.
        size: its samples, over all ranks.
        num_samples: of the dataset; 0: nobody knows which sample is at a position.
    """

    step: int
    first: int
    size: int
    num_samples: int

    @classmethod
    def read(cls, slot: memoryview) -> "InHand | None":
        """What a worker has shown last (observing/heartbeat.py); None: none of a step's."""
        if not slot[HELD_STEP]:
            return None
        return cls(slot[HELD_STEP], slot[HELD_FROM], slot[HELD_SIZE], slot[DATASET])

    def samples(self, seed: int) -> list[int]:
        """Their indices in the dataset, in the order in which the step feeds them; [] where nobody knows."""
        if not self.num_samples:
            return []
        import numpy as np

        from allranks.data.cut import Cut
        from allranks.data.stream import DataStream

        stream = DataStream(range(self.num_samples), cut=Cut(1), seed=seed)
        found: list[int] = stream.samples_at(np.arange(self.first, self.first + self.size)).tolist()
        return found


def explain_ends(ends: Sequence[InHand | None], config: Config) -> str:
    """What attempts that ended in a row had in hand, and the next move, in lines; "" of less than two."""
    if len(ends) < 2:
        return ""
    held = [one for one in ends if one is not None]
    if not held:
        return "each ended with no step's samples in hand"
    if len(held) < len(ends) or len(set(held)) > 1:
        steps = sorted({one.step for one in held})
        between = "" if len(held) == len(ends) else " and with none in hand"
        return f"they ended in step {', '.join(map(str, steps))}{between}: it is no single step's samples"
    one, samples = held[0], held[0].samples(config.train.seed)
    past = one.first + one.size
    more = f" and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
    named = f": samples {', '.join(map(str, samples[:SHOWN]))}{more} of dataset('train')" if samples else ""
    where = f"positions {one.first} to {past - 1} in the order of samples"
    skip = config.data.left_out.and_also(one.first, past)
    return (
        f"each ended in step {one.step}, which feeds {where}{named}\n"
        f"next: look at these samples; `allranks train --resume RUN data.skip={skip} --change data.skip` goes around "
        "them"
    )
