"""The noun ModelProfile: what its blocks add up to, each as often as it is there."""

from allranks.model_profile import Block, ModelProfile, Operation

EMBEDDING = Block("embedding", (Operation("table", "embedding", parameters=1000, saved_bytes=8.0),))
LAYER = Block(
    "layers.*",
    (
        Operation("up", "matmul", flops=600.0, parameters=300, saved_bytes=40.0),
        Operation("down", "matmul", flops=400.0, parameters=200, saved_bytes=20.0),
    ),
    count=5,
    repeated=True,
)
HEAD = Block("head", (Operation("logits", "matmul", flops=70.0, parameters=0),))
PROFILE = ModelProfile("tiny", (EMBEDDING, LAYER, HEAD), "bfloat16")


def test_a_block_is_the_sum_of_its_operations() -> None:
    assert (LAYER.parameters, LAYER.flops, LAYER.saved_bytes) == (500, 1000.0, 60.0)


def test_a_model_is_the_sum_of_its_blocks_each_as_often_as_it_is_there() -> None:
    assert PROFILE.parameters == 1000 + 5 * 500
    assert PROFILE.flops == 5 * 1000.0 + 70.0


def test_a_pipeline_shares_out_the_repeated_blocks_alone() -> None:
    assert PROFILE.num_repeated == 5
    assert ModelProfile("none", (EMBEDDING, HEAD), "float32").num_repeated == 0
