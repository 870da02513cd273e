"""The page that shows every published run beside its prediction: the output of bench/plan_accuracy.py."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM, DATA = ROOT / "bench" / "plan_accuracy.py", ROOT / "bench" / "data" / "published-runs.json"
INTRODUCTION = """How near the [estimate](planner.md) comes to runs that others have published.
`python bench/plan_accuracy.py bench/data/published-runs.json` prints the same; the rows with their sources are in that
file.

- step, median: mean and median of |predicted / published - 1| of the seconds of a step; memory: the mean of the peak.
- ran out: rows that ran out of memory, as the source says; false fits: those of them that are called a fit; false
  refusals: rows of the others, which ran, that are not.
- regret: by how much the configuration predicted to be the fastest of those compared is slower than the fastest.
- coverage: rows whose time lies in the 90% interval; high/low: the interval's median width.
- stated: 16 bits, with micro-batch, recompute and schedule given. calibration: rows that constants were fitted to;
  held_out: all others; held_out_sources: sources of which no constant has seen a row; stated_a_b: stated ones that the
  table's compiler does not call suspicious (quality_c).
- "Which is the fastest": the regret of this estimate, of Calculon's, and of the rule of thumb, each on the groups of
  which Calculon predicted every row. "Not estimated": rows of the file that are left out, and why.
- A row whose source states no micro-batch is estimated with the fastest of 1, 2 and 4 that fits; one that does not
  state what is recomputed with the least that fits. Neither is "stated".
- "Row by row": fitted says whether a row is one of calibration; Calculon's seconds are its authors' tool's, run
  by the table's compiler.
"""


def render_accuracy(note: str) -> str:
    """The page, from a run of the program in a process of its own (bench/ is no package)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(PROGRAM), str(DATA), "--markdown"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return f"# Predicted beside published\n\n{note}{INTRODUCTION}\n{done.stdout}"
