"""Every error that allranks raises on purpose, in one tree.

    AllranksError                 exit code
    ├── ConfigError        2      a key, a value, a TOML file or a command-line argument
    ├── LayoutError        2      degrees that do not fit world, model or batch: the message is the equation
    ├── TaskError          2      a Task that cannot be found or loaded, or that breaks its contract
    ├── DataError          2      a dataset that is empty, too small, or does not say how it is ordered
    ├── RunError          78      a Run directory that refuses: no Run, another task or config, leased, read-only
    ├── CheckpointError   78      a checkpoint that is torn, incomplete, reshaped or altered
    ├── ProcessError      76      a transient condition: a port in use, a peer or a store lost
    ├── RollbackError     76      the run goes back to a checkpoint, and around samples, when it is started again
    ├── MemoryShortError   1      memory ran out in a step, and its forwards cannot be made smaller
    ├── GuardError        93      a guard has ended the run: nothing is learnt any more, or copies are not alike
    └── SpikeError        93      the loss is a spike once more, and the run goes back no more

Each carries one line: what is wrong, where, and the next move. The command prints that line and exits with the class's
code; inside a worker the code 2 ("refused before a worker starts") becomes 78 ("refused by a worker").
"""


class AllranksError(Exception):
    """The root of the tree; raised only as one of its leaves."""

    exit_code: int = 2


class ConfigError(AllranksError):
    """A config key, a value, a TOML file or a command-line argument is wrong."""


class LayoutError(AllranksError):
    """The degrees of a Layout do not fit the world, the model or the batch."""


class TaskError(AllranksError):
    """A Task cannot be found or loaded, or breaks its contract."""


class DataError(AllranksError):
    """A dataset is empty, smaller than a batch, or does not declare its order."""


class RunError(AllranksError):
    """A Run directory refuses: it is no Run, holds another one, is leased or cannot be written."""

    exit_code = 78


class CheckpointError(AllranksError):
    """A checkpoint is torn, incomplete, reshaped or altered."""

    exit_code = 78


class ProcessError(AllranksError):
    """A transient condition outside the program: a port in use, a peer or a store lost."""

    exit_code = 76


class RollbackError(AllranksError):
    """The run goes back to its newest checkpoint, and around samples, when it is started again."""

    exit_code = 76


class MemoryShortError(AllranksError):
    """Memory ran out in a step.

    Attributes:
        divisible: whether the same step may be cut into smaller forwards.
    """

    exit_code = 1

    def __init__(self, message: str, *, divisible: bool = False) -> None:
        super().__init__(message)
        self.divisible = divisible


class GuardError(AllranksError):
    """A guard has ended the run: gradients stay not finite, or copies of the model are not alike."""

    exit_code = 93


class SpikeError(AllranksError):
    """The loss is a spike once more, and the run goes back no more; all that was saved is of before it."""

    exit_code = 93


WORKER_REFUSED = 78


def worker_exit_code(error: AllranksError) -> int:
    """The exit code of a worker that stops with `error`."""
    return WORKER_REFUSED if error.exit_code == AllranksError.exit_code else error.exit_code
