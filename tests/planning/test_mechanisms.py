"""What torch does as allranks sets it up: bytes for a parameter, and what a loss holds."""

from dataclasses import replace

from allranks.planning.mechanisms import Mechanisms, mechanisms_of
from allranks.upkeep import Upkeep
from tests.planning.profiles import choose


def test_float32_parameters_whatever_the_precision() -> None:
    ddp = mechanisms_of(choose(dp_replicate=8))
    # Law 7: parameters, gradients and both moments of Adam in float32; autocast's copies of the weights beside them.
    assert (ddp.weight_bytes, ddp.gradient_bytes, ddp.optimizer_bytes, ddp.cast_bytes) == (4, 4, 8, 2)
    fsdp = mechanisms_of(choose(dp_shard=8))
    assert (fsdp.gather_bytes, fsdp.reduce_bytes, fsdp.cast_bytes) == (2, 4, 0)
    half = replace(choose(dp_shard=8), precision="float16")  # which parallel/precision gathers in float32
    for wide in (mechanisms_of(choose(dp_shard=8, gather="float32")), mechanisms_of(half)):
        assert (wide.gather_bytes, wide.cast_bytes) == (4, 2)
    double = mechanisms_of(replace(choose(dp_replicate=2), precision="float64"))
    assert (double.weight_bytes, double.optimizer_bytes, double.cast_bytes) == (8, 16, 0)


def test_what_the_optimizer_and_an_average_keep() -> None:
    """As dry runs count it: of sgd nothing, of train.ema one number more, in the parameters' type."""
    found = [
        mechanisms_of(replace(choose(dp_shard=8), precision=precision, upkeep=Upkeep(state_values=values)))
        for precision, values in (("bfloat16", 0), ("bfloat16", 3), ("float64", 3))
    ]
    assert [how.optimizer_bytes for how in found] == [0, 12, 24]


def test_a_compressing_hook_halves_the_traffic() -> None:
    assert mechanisms_of(choose(dp_replicate=8, ddp_hook="bfloat16")).reduce_bytes == 2
    assert mechanisms_of(choose(dp_replicate=8)).reduce_bytes == 4


def test_tensor_parallelism_makes_its_loss_operation_by_operation() -> None:
    how = mechanisms_of(choose(tp=2))
    assert how.cut_logits_copies > how.logits_copies == Mechanisms().logits_copies


def test_a_compiled_block_is_repeated_to_its_end() -> None:
    """Its products are one operation to torch.utils.checkpoint, which stops before the last product else."""
    assert mechanisms_of(choose(dp_shard=8, recompute="full")).recomputes_to_last_kept
    assert not mechanisms_of(choose(dp_shard=8, recompute="full", compile="block")).recomputes_to_last_kept
