"""Runs a command to its end, and writes what it has used into a file: python usage.py FILE COMMAND...

A small process between the tests and the command: the kernel counts into a process's largest memory what the one that
started it had at that moment.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

code = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
found = {"processor_seconds": used.ru_utime + used.ru_stime, "memory_bytes": 1024 * used.ru_maxrss}
Path(sys.argv[1]).write_text(json.dumps(found))
sys.exit(code)
