"""The mixture of experts of ten million parameters under the router of the tests, which gives each equally many tokens.

How many tokens travel is then known before they do: what a dry run says of them can be right to the byte.
"""

import sys
from pathlib import Path
from typing import Any

from allranks.benchmarking.subject import NUM_EXPERTS, SIZES, TOP_K, Subject
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer


class EvenSubject(Subject):
    """What the benchmarks train, with experts that are chosen in turn."""

    def model(self) -> Transformer | MoETransformer:
        """The model, its routers exchanged."""
        sys.path.append(str(Path(__file__).parents[1]))
        from tests.rehearsing.tasks import InTurn

        model = super().model()
        blocks: Any = model.layers
        for block in blocks:
            block.feed_forward.router = InTurn(SIZES[self.size].hidden, NUM_EXPERTS, TOP_K)
        return model
