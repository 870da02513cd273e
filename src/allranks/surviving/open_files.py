"""How many files a process may have open: raised as far as it may be, or refused before anything starts."""

import resource

from allranks.errors import ConfigError

LEAST_FILES = 64
"""A run of two processes has less than 48 open in each; a dataset opens its own beside them."""


def provide_open_files() -> None:
    """See that this process, and those that it starts, may have LEAST_FILES open.

    Raises:
        ConfigError: the system lets it have fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft):
        return
    if not _allows(hard):
        raise ConfigError(
            f"a process may have {hard} files open here, and training needs {LEAST_FILES} or more: say "
            "`ulimit -n 1024` first, or have the limit raised (limits.conf, LimitNOFILE=, docker run --ulimit)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, hard))


def _allows(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= LEAST_FILES
