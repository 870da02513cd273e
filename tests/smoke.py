"""The smoke subset, `pytest -m smoke`: whether a torch, or a machine, is one that allranks works on, within minutes.

It is every test of the rooms that call torch which neither starts processes nor is marked `full`, and the cases named
here: of every axis and mode a run held to one device, and the real command from start to resume. tests/test_smoke.py
fails where a line here names nothing any more.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import pytest

ROOMS = ("checkpointing", "data", "models", "observing", "parallel", "profiling", "stepping", "training", "verifying")

LAWS = "tests/distributed/test_matrix.py::test_equal_to_one_device"
CASES = (
    # The matrix: what its sample has for two processes, and of four where torch's inner parts are leant on the most.
    *(f"{LAWS}[{row}]" for row in ("singlex1", "*x2", "hsdpx4", "tp-fsdpx4", "pp-fsdpx4")),
    "tests/distributed/test_context_laws.py::test_equal_to_one_device[cp=2-decoder-1]",
    "tests/distributed/test_context_laws.py::test_equal_to_one_device[cp=2-ring-decoder-3]",
    "tests/distributed/test_context_laws.py::test_equal_to_one_device[tp=2,cp=2-decoder-3]",
    "tests/distributed/test_expert_laws.py::test_equal_to_one_device[dp_replicate=2,ep=2-12in1]",
    "tests/distributed/test_expert_laws.py::test_equal_to_one_device[dp_shard=2,ep=2-13in3]",
    "tests/distributed/test_offload_laws.py::test_equal_to_one_device[fsdp-scalars]",
    "tests/distributed/test_loss_parallel_laws.py::test_it_computes_what_one_device_does_with_whole_logits[tp-transformer]",
    "tests/distributed/test_float16_laws.py::test_all_ranks_skip_together_and_train_on[fsdp-adamw]",
    "tests/distributed/test_float8_laws.py::test_a_run_is_what_its_simulation_computes[fsdp]",
    "tests/distributed/test_hook_laws.py::test_it_is_what_its_simulation_computes[mlp-ddp-2-()-*",
    "tests/distributed/test_hugging_face.py::*[tp=2-2-llama]",
    "tests/distributed/test_hugging_face.py::*[pp=2-2-told0-llama]",
    "tests/distributed/test_hugging_face.py::*[llama-cp=2-2]",
    "tests/distributed/test_layout_pairs.py::test_one_layout_loads_what_another_saved[*fsdp-single]",
    "tests/distributed/test_layout_pairs.py::test_one_layout_loads_what_another_saved[optimizer-fsdp]",
    *(
        f"tests/distributed/test_more_laws.py::test_a_restart_changes_no_bit[{case}"
        for case in ("ddp-4-*", "fsdp-*", "tp=2,dp_shard=2*")
    ),
    *(
        f"tests/parallel/test_compiled.py::test_compiled_blocks_compute_the_same[{case}"
        for case in ("counting-fsdp-*", "encoder-tp=2-*", "sharing-ddp-*")
    ),
    "tests/parallel/test_ring.py::*",
    "tests/parallel/test_tensor_ops.py::test_a_compiled_move_has_its_backward[*-True]",
    "tests/parallel/test_expert_ops.py::test_gradients_go_back_through_a_compiled_exchange",
    "tests/parallel/test_parting.py::*",
    *(
        f"tests/training/own/test_driven.py::test_one_loop_is_what_one_device_computes[{case}]"
        for case in ("single-1", "tp=2-2", "pp=2-2", "pp=2,cp=2-4")
    ),
    *(
        f"tests/training/test_door.py::test_it_computes_what_one_device_computes[None-{case}"
        for case in ("3-ddp-*", "*sharding=*", "*tp=2*")
    ),
    "tests/cli/test_running.py::test_a_run_from_start_to_report",
    "tests/cli/test_running.py::test_killed_and_resumed_is_bitwise_the_uninterrupted_run[2-ddp-*",
    "tests/cli/test_running.py::test_resumed_at_other_sizes_and_layouts_sees_the_same_samples",
)


def is_case(node_id: str, case: str) -> bool:
    """Whether a line of CASES names this test; `*` stands for anything, brackets for themselves."""
    return fnmatchcase(node_id, case.replace("[", "[[]"))


def is_smoke(node_id: str, marks: Iterable[str]) -> bool:
    """Whether a test with these marks belongs to the subset."""
    marked = {"full", "distributed"}.intersection(marks)
    alone = not marked and node_id.startswith(tuple(f"tests/{room}/" for room in ROOMS))
    return alone or ("full" not in marked and any(is_case(node_id, case) for case in CASES))


NOTHING_NAMED = pytest.StashKey[list[str]]()
"""What `nothing_named` says of the whole suite, for tests/test_smoke.py; [] where only a part of it is collected."""


def nothing_named(node_ids: Sequence[str]) -> list[str]:
    """The lines of CASES that name none of these tests."""
    return [case for case in CASES if not any(is_case(node_id, case) for node_id in node_ids)]
