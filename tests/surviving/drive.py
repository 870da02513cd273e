"""A command of its own for these tests: `python -m tests.surviving.drive JSON` runs workers and prints the outcome."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from allranks.surviving import forkserver
from allranks.surviving.forkserver import StartMethod
from allranks.verdict import Decision


def main() -> int:
    """Start first what is started first."""
    wanted = json.loads(sys.argv[1])
    method = None
    if wanted.pop("spawn"):
        method = StartMethod("spawn", Decision("workers are spawned", "the test says so"))
    else:
        forkserver.start()
    from allranks.surviving.agent import run_workers

    entry, args = "tests.surviving.entries:" + wanted.pop("entry"), tuple(wanted.pop("args"))
    log_dir = Path(wanted.pop("log_dir"))
    outcome = run_workers(entry, args, run_id="test", log_dir=log_dir, start_method=method, **wanted)
    failure = None if outcome.first_failure is None else asdict(outcome.first_failure)
    if outcome.first_failure is not None:
        print(outcome.first_failure.render(), file=sys.stderr)
    print(json.dumps({"exit_code": outcome.exit_code, "failure": failure}))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
