"""Which modules only `allranks bench` loads."""

import json
import subprocess
import sys
from pathlib import Path

from tests.full_record import Tree
from tests.loaded import Measuring, named_in

ROOT = Path(__file__).parents[1]
PACKAGE = {
    "allranks": "",
    "allranks.cli": "",
    "allranks.cli.bench": """
from typing import TYPE_CHECKING
import allranks.shown
if TYPE_CHECKING:
    import allranks.typed
def bench():
    from allranks import measured
""",
    "allranks.cli.train": "def train():\n    run('python -m allranks.worker')\n",
    "allranks.worker": "",
    "allranks.shown": "",
    "allranks.typed": "",
    "allranks.measured": "import allranks.timed, allranks.worker, allranks.helped",
    "allranks.timed": "",
    "allranks.helped": "",
    "allranks.programmed": "import allranks.shown",
    "allranks.nobody": "",
}


def test_what_a_source_names() -> None:
    text = "import a.b\nfrom c import d\ndef f():\n    import e\n    return 'allranks.x.y:z'\n"
    assert {*named_in(text)} == {"a", "a.b", "c", "c.d", "e", "allranks", "allranks.x", "allranks.x.y"}
    assert {*named_in(text, calls=False)} == {"a", "a.b", "c", "c.d"}


def test_what_bench_alone_loads() -> None:
    """Not what another module loads too, or a helper of tests; not what nobody names: who knows who does."""
    measuring = Measuring(PACKAGE, ["from allranks.programmed import f"], ["import allranks.helped"])
    assert measuring.names == {"allranks.measured", "allranks.timed", "allranks.programmed"}
    assert measuring.of("patch('allranks.measured.f')") == {"allranks.measured", "allranks.timed"}
    assert measuring.of("import allranks.worker") == set()


def test_a_training_loads_none_of_them(tmp_path: Path) -> None:
    """The source may hide an import, a run cannot."""
    program = (
        "import json, sys; from allranks.cli.main import main; assert main(sys.argv[1:]) == 0; "
        "print(json.dumps(sorted(name for name in sys.modules if name.startswith('allranks'))))"
    )
    task = f"{ROOT / 'tests' / 'training' / 'tasks.py'}:Curve"
    words = ("train", task, "--nproc", "1", "--run", str(tmp_path / "run"), "train.steps=1", "evaluate.every=0")
    ran = subprocess.run((sys.executable, "-c", program, *words), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    loaded = {*json.loads(ran.stdout.splitlines()[-1])}
    measuring = Tree(ROOT).measuring.names
    assert "allranks.benchmarking.raw" in measuring and len(loaded) > 50
    assert not loaded & measuring
