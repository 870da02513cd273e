"""`python -m tools.full_results`: keep with the source what passed on it in `make test-full`.

The parts' records in `.full/` belong to one checkout, and are joined with what bench/results/full.json holds already.
"""

from pathlib import Path

from tests.full_record import KEPT, Tree, all_results, keep_results, passed_on

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Keep what passed on this very source, and say how many tests that are."""
    passed = passed_on(Tree(ROOT), all_results(ROOT))
    keep_results(ROOT, passed)
    print(f"{len(passed)} tests passed on this source; kept in {KEPT}")


if __name__ == "__main__":
    main()
