"""Questions for tests of planning, about models by name."""

from typing import Any

from allranks.named_models import find_model
from allranks.planning.hardware import find_cluster
from allranks.planning.question import Question


def ask(model: str = "llama3-8b", where: str = "2x8:a100-80g", batch: int = 32, **changes: Any) -> Question:
    """A question about a named model, of 4096 positions where nothing else is said."""
    return Question(find_model(model).profile, find_cluster(where), batch, **{"seq": 4096, **changes})
