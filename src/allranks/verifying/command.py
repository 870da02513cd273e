"""From what `allranks verify` was asked to an Answer: an own loop, or a Task under a layout."""

from allranks.errors import ConfigError
from allranks.process_environment import NO_GPUS, changed_environment
from allranks.request import TrainRequest
from allranks.task import TaskSpec
from allranks.task_loading import load_module
from allranks.verifying.answer import Answer
from allranks.verifying.own_verify import verify_program
from allranks.verifying.program import NEEDED, load_program
from allranks.verifying.task_verify import verify_task

OWN_PROCESSES = 2


@changed_environment(NO_GPUS)  # the user's modules are imported in this process, too
def verify_request(request: TrainRequest, num_steps: int) -> Answer:
    """Verify what `request` names. Raises the errors of bad input."""
    if request.task_spec is not None and is_own_loop(request.task_spec):
        return _own_loop(request, num_steps)
    return verify_task(request, num_steps)


def is_own_loop(spec: str) -> bool:
    """Whether a file defines an own loop, or part of one, rather than a Task."""
    parsed = TaskSpec.parse(spec)
    if parsed.file is None or parsed.name is not None:
        return False
    defined = vars(load_module(parsed))
    return "build" in defined and any(word in defined for word in NEEDED[1:])


def _own_loop(request: TrainRequest, num_steps: int) -> Answer:
    assert request.task_spec is not None
    given = {"a config file": request.toml, "config keys": request.overrides, "--layout": request.layout}
    for what, value in given.items():
        if value:
            raise ConfigError(f"{request.task_spec} is a loop of its own, which {what} cannot change: leave it out")
    load_program(request.task_spec)  # what is missing is said before a process starts
    spec = str(TaskSpec.parse(request.task_spec))
    return verify_program(spec, nproc=request.nproc or OWN_PROCESSES, num_steps=num_steps)
