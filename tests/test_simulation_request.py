"""What `allranks simulate` was asked."""

import inspect

from allranks.cli.simulate import simulate
from allranks.simulation_request import SimulationRequest


def test_the_defaults_are_those_of_the_command() -> None:
    options = inspect.signature(simulate).parameters
    request = SimulationRequest(cluster="8:h100")

    for name in SimulationRequest.__dataclass_fields__:
        if name not in ("cluster", "arguments"):
            assert options[name].default == getattr(request, name), name
