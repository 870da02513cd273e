"""What tp adds on a processor: each move as gloo was measured, the copies around it, and what is fixed."""

from dataclasses import replace

import pytest

from allranks.cluster import FixedSeconds
from allranks.model_profile import Block, Operation
from allranks.planning.axis_traffic import axes_of, axis_traffic
from allranks.planning.processor import passing_seconds
from allranks.planning.processor_tensor import tensor_seconds
from allranks.planning.processor_traffic import on_processor
from allranks.planning.setting import Setting
from tests.planning.profiles import decoder
from tests.planning.test_processor import CPU
from tests.planning.test_processor_traffic import WHERE

MOVE = 1e-3
FIXED = replace(WHERE, device=replace(CPU, fixed=FixedSeconds(move=MOVE)))
ALONG = replace(decoder(), blocks=(Block("norm", (Operation("norm", "norm", cut="sequence"),)),))
SETTING = on_processor(Setting(4, 4, tp=2, precision="float32"), FIXED, ALONG)
WHOLE = replace(SETTING, mechanisms=replace(SETTING.mechanisms, sequence_parallel=False))
ROW = Operation("down", "matmul", shape=(128, 64, 256), output_bytes=128 * 64 * 4.0, parameters=64 * 256, cut="row")
SIZE = 4 * ROW.output_bytes
SUM = 1e-4 + 1e-9 * SIZE + passing_seconds(CPU, 2 * SIZE, 1) + MOVE
AROUND = passing_seconds(CPU, 3 * SIZE, 2) + MOVE  # half of it is a rank's part
GATHER, SCATTER = 2e-4 + 2e-9 * SIZE + AROUND, 3e-4 + 3e-9 * SIZE + AROUND


def seconds(operation: Operation, setting: Setting) -> float:
    return tensor_seconds(operation, setting, axes_of(FIXED, setting).tensor, FIXED.device)


def test_the_engines_plan_says_whether_activations_are_cut_along_the_sequence() -> None:
    assert SETTING.sequence_parallel
    assert not on_processor(Setting(4, 4, tp=2), FIXED, decoder()).sequence_parallel


def test_a_product_cut_by_rows_is_summed_forth_and_back() -> None:
    assert seconds(ROW, WHOLE) == pytest.approx(2 * SUM, rel=0.01)
    assert seconds(ROW, SETTING) == pytest.approx(2 * (GATHER + SCATTER), rel=0.01)
    biased = replace(ROW, parameters=64 * 256 + 64)
    assert seconds(biased, WHOLE) == seconds(ROW, WHOLE)
    assert seconds(biased, SETTING) - seconds(ROW, SETTING) == pytest.approx(1e-4 + MOVE, rel=0.02)


def test_words_and_their_logits_travel_too() -> None:
    words = replace(ROW, kind="embedding", cut="vocab", shape=())
    assert seconds(words, WHOLE) == pytest.approx(SUM, rel=0.01)
    assert seconds(words, SETTING) == pytest.approx(GATHER + SCATTER, rel=0.01)
    head = replace(ROW, cut="vocab", shape=(128, 64, 64))
    assert seconds(head, WHOLE) == pytest.approx(SUM, rel=0.01)
    assert seconds(head, SETTING) == pytest.approx(GATHER + SCATTER, rel=0.01)
    whole = replace(head, gathered=True)
    assert seconds(whole, WHOLE) - seconds(head, WHOLE) == pytest.approx(GATHER, rel=0.01)
    assert seconds(whole, SETTING) - seconds(head, SETTING) == pytest.approx(GATHER, rel=0.01)


def test_a_norm_of_cut_positions_has_its_gradients_summed() -> None:
    norm = Operation("norm", "norm", output_bytes=128 * 64 * 4.0, parameters=64, cut="sequence")
    assert seconds(norm, SETTING) == pytest.approx(1e-4 + MOVE, rel=0.02)
    assert seconds(norm, WHOLE) == seconds(replace(norm, trained=False), SETTING) == 0.0
    assert seconds(replace(ROW, cut="column"), SETTING) == 0.0


def test_a_block_asks_it_on_a_processor_alone() -> None:
    block = replace(decoder().blocks[0], operations=(ROW,))
    assert axis_traffic(block, SETTING, axes_of(FIXED, SETTING))[0].tensor == seconds(ROW, SETTING)
    gpu = replace(FIXED, device=replace(CPU, measured=False))
    assert axis_traffic(block, SETTING, axes_of(gpu, SETTING))[0].tensor < seconds(ROW, SETTING)
    alone = replace(SETTING, tp=1)
    assert axis_traffic(block, alone, axes_of(FIXED, alone))[0].tensor == 0.0
