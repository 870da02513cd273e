"""No clean program is accused, under any layout that it allows, whatever its seeds are."""

import json
from pathlib import Path

import pytest

from allranks.config_sections import AXES
from allranks.verifying.corpus import read_corpus
from tests.commands import allranks
from tests.verifying.clean_runs import (
    DATA_PARALLEL,
    OTHERS,
    RUN_BY,
    SEEDS,
    accused,
    clean_programs,
    has_to_run,
    is_task,
    moved,
    runs_of,
    variant,
    write_variants,
)
from tests.verifying.covering_runs import EXAMPLES, covering_runs, modes, prepare, write_covering

NUM_PARTS = 15
COVERING_PARTS = 3


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(1, NUM_PARTS + 1))
def test_no_clean_program_is_accused(part: int, tmp_path: Path) -> None:
    write_variants(tmp_path / "variants")
    words = ("bench", "verify", "variants", "--json", "--part", f"{part}/{NUM_PARTS}")
    document = json.loads(allranks(*words, folder=tmp_path, check=None, limit=1700.0).stdout)
    assert document["results"] and accused(document) == []


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(1, COVERING_PARTS + 1))
def test_nothing_clean_is_accused_under_any_mode(part: int, tmp_path: Path) -> None:
    write_covering(tmp_path / "covering")
    prepare(tmp_path)
    words = ("bench", "verify", "covering", "--json", "--part", f"{part}/{COVERING_PARTS}")
    results = json.loads(allranks(*words, folder=tmp_path, check=None, limit=1700.0).stdout)["results"]
    assert results and [result for result in results if result["exit_code"] != 0] == []


def test_every_mode_and_every_example_is_covered(tmp_path: Path) -> None:
    runs = covering_runs()
    words = [set(layout.replace("--layout ", "").replace(",", " ").split()) for _, layout, _ in runs]
    words += [set(layout.replace("--layout ", "").replace(",", " ").split()) for layout in (*DATA_PARALLEL, *OTHERS)]
    for key, values in modes().items():
        assert values, key
        assert {f"{key}={value}" for value in values} <= set().union(*words), key
    axes = [{word.partition("=")[0] for word in some} & {*AXES} for some in words]
    assert sum(len(some) == 3 for some in axes) >= 3
    for precision in ("bfloat16", "float16"):
        assert len({name for name, layout, _ in runs if precision in layout}) >= 2
    assert len(EXAMPLES) == 10 and EXAMPLES.keys() <= {name for name, _, _ in runs}
    assert {seed for _, _, seed in runs} == set(SEEDS)
    write_covering(tmp_path / "covering")
    found = read_corpus(tmp_path / "covering")
    assert len(found) == len(runs) and all(entry.clean and len(entry.runs) == 1 for entry in found)


def test_every_clean_program_comes_with_every_seed(tmp_path: Path) -> None:
    write_variants(tmp_path / "variants")
    found = read_corpus(tmp_path / "variants")
    assert [entry.name for entry in found] == sorted(f"{e.name}_{seed}" for e in clean_programs() for seed in SEEDS)
    assert all(entry.clean for entry in found)
    for entry in clean_programs():
        texts = {(tmp_path / "variants" / f"{entry.name}_{seed}.py").read_text() for seed in SEEDS}
        assert len(texts) == len(SEEDS), f"{entry.name} sets no seed"


def test_a_task_is_run_under_every_layout_and_a_loop_on_its_numbers_of_processes() -> None:
    programs = {entry.name: entry for entry in clean_programs()}
    runs = runs_of(programs["task_text"], 2)
    assert runs[0] == "--layout ddp --nproc 2 --steps 2 train.seed=2"
    assert runs[-1] == "--layout dp_shard=2 train.precision=bfloat16 --steps 2 train.seed=2"
    assert len(runs) == len(set(runs)) == 14
    assert runs_of(programs["stream"], 1) == ["--nproc 2 --steps 2", "--nproc 3 --steps 2"]


def test_seeds_are_moved_and_nothing_else() -> None:
    text = (
        '"""Clean: a.\n\nverify: --nproc 2\nverify: --nproc 4\n"""\n'
        "torch.manual_seed(100 + rank)\n"
        "x = torch.randn(4, generator=torch.Generator().manual_seed(seed)), np.random.default_rng((epoch, i))\n"
        "sampler = DistributedSampler(x, 2, 0, seed=0)\n"
    )
    assert moved(text, 3).splitlines()[5:] == [
        "torch.manual_seed(3 + 100 + rank)",
        "x = torch.randn(4, generator=torch.Generator().manual_seed(3 + seed)), np.random.default_rng((3 + epoch, i))",
        "sampler = DistributedSampler(x, 2, 0, seed=3 + 0)",
    ]
    first, *_, run, end, code = variant(text, ["--nproc 3"], 0).splitlines()[:5]
    assert (first, run, end, code) == ('"""Clean: a.', "verify: --nproc 3", '"""', "torch.manual_seed(0 + 100 + rank)")


def test_what_may_not_be_refused_is_accused_where_it_is() -> None:
    def result(name: str, run: str, exit_code: int) -> dict[str, object]:
        return {"name": name, "run": f"{run} --steps 2 train.seed=1", "exit_code": exit_code}

    right = [result("task_gan_1", DATA_PARALLEL[0], 0), result("task_gan_1", "--layout pp=2", 2)]
    wrong = [
        result("task_gan_1", DATA_PARALLEL[1], 2),
        result("task_deep_1", "--layout pp=2", 2),
        result("task_contrastive_1", "--layout tp=2", 2),
        result("task_gan_1", "--layout pp=2", 3),
        result("tied_2", "--nproc 2", 1),
    ]
    assert accused({"results": [*right, *wrong]}) == wrong
    assert has_to_run("tied_2", "--nproc 4 --steps 2")
    tasks = {entry.name for entry in clean_programs() if is_task(entry)}
    assert RUN_BY.keys() <= set(OTHERS) and tasks.issuperset(name for names in RUN_BY.values() for name in names)
