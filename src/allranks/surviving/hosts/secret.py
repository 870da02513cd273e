"""The secret that the hosts of a run share: from a file that only its owner reads, or from the environment.

It signs all that hosts tell each other. It never stands on a command line, in a log, in run.json or in the store, and
the workers do not get it.
"""

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from allranks.errors import ConfigError

VARIABLE = "ALLRANKS_SECRET"
LEAST_BYTES, MOST_BYTES = 16, 4096
MAKE_ONE = "`(umask 077; openssl rand -hex 32 > FILE)` makes one"


def take_secret(file: Path | None, environ: MutableMapping[str, str]) -> bytes:
    """The secret of `file`, or of ALLRANKS_SECRET, which is removed from `environ`: processes started later lack it.

    Raises:
        ConfigError: there is none, there are two, it is too short, or others can read the file.
    """
    given = environ.pop(VARIABLE, "")
    if file is not None and given:
        raise ConfigError(f"--secret-file {file} and {VARIABLE} both give a secret: give one of them")
    if file is None and not given:
        raise ConfigError(f"several hosts need a secret: --secret-file FILE, or {VARIABLE}; {MAKE_ONE}")
    secret = given.encode() if file is None else _read_private(file)
    if len(secret.strip()) < LEAST_BYTES:
        where = VARIABLE if file is None else f"--secret-file {file}"
        raise ConfigError(f"{where} is too short for a secret: at least {LEAST_BYTES} bytes; {MAKE_ONE}")
    return secret.strip()


def _read_private(file: Path) -> bytes:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not make the command wait
    except OSError as error:
        raise ConfigError(f"--secret-file {file} cannot be read: {error.strerror}; {MAKE_ONE}") from error
    try:
        found = os.fstat(descriptor)  # of what was opened: the name may point elsewhere by now
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"--secret-file {file} is no file; {MAKE_ONE}")
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise ConfigError(f"--secret-file {file} has mode {mode:04o}, so others can use it: `chmod 600 {file}`")
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)
