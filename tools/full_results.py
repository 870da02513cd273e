"""`python -m tools.full_results`: keep with the source what passed on it in `make test-full`.

The parts' records in `.full/` belong to one checkout, and are joined with what bench/results/full.json holds already.
"""

import json
from pathlib import Path

import pytest

from tests.full_record import KEPT, Tree, all_results, keep_results, passed_on
from tools.faults import CASES, count_cases, named_tests

ROOT = Path(__file__).parents[1]


class Collected:
    """A plugin of pytest's that notes every test there is, also those that a mark leaves out."""

    def __init__(self) -> None:
        self.node_ids = list[str]()

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Before anything is deselected."""
        self.node_ids.append(item.nodeid)


def collect_cases() -> dict[str, int]:
    """How many cases each test of the table of faults has; raises RuntimeError where a module cannot be imported."""
    modules = sorted({test.function.partition("::")[0] for test in named_tests()})
    found = Collected()
    ended = pytest.main(["--collect-only", "-qq", "--no-header", "--rootdir", str(ROOT), *modules], plugins=[found])
    if ended != pytest.ExitCode.OK:
        raise RuntimeError(f"the tests of tools/faults.toml cannot be collected: pytest ended with {ended}")
    return count_cases(found.node_ids)


def main() -> None:
    """Keep what passed on this very source, and say how many tests that are; count the cases of what shows a fault."""
    (ROOT / CASES).write_text(json.dumps(collect_cases(), indent=0) + "\n", encoding="utf-8")
    passed = passed_on(Tree(ROOT), all_results(ROOT))
    keep_results(ROOT, passed)
    print(f"{len(passed)} tests passed on this source; kept in {KEPT}")


if __name__ == "__main__":
    main()
