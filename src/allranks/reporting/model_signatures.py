"""What is said of a model and its wrappers: their parameters, devices and types. A part of the table of signatures."""

from allranks.reporting.signature import Signature

MOVE_THERE = (
    "take the device of a tensor that a forward makes from another one (device=x.device), and move there what was "
    "left behind (.to(x.device), register_buffer); a model that device_map='auto' has spread: give it to allranks on "
    "one device"
)
OF_MODELS: tuple[Signature, ...] = (
    Signature(
        "E16",
        r"Must flatten tensors with uniform `?(requires_grad|dtype)",
        "FSDP1 cannot put parameters of unequal {1} into one flat one",
        "use FSDP2 (--layout fsdp does), or FSDP1's use_orig_params=True",
    ),
    Signature(
        "E17",
        r"Expected to have finished reduction in the prior iteration",
        "some parameters got no gradient in the step before, on some ranks at least",
        "TORCH_DISTRIBUTED_DEBUG=INFO names them; name such modules in hints().optional (or say "
        "world.parallelize(model, find_unused=True)), or let every forward use them",
        known="reproduced",
    ),
    Signature(
        "E18",
        r"marked as ready twice",
        "DDP saw one parameter's gradient twice in a backward",
        "use non-reentrant checkpointing; look for modules that are shared, or forwarded twice before one backward",
        known="reproduced",
    ),
    Signature(
        "E19",
        r"does not seem to reference any FSDP parameters",
        "the optimizer was made before the model was wrapped, so that it trains nothing",
        "make the optimizer from the parameters of the wrapped model",
    ),
    Signature(
        "E20",
        r"'weight' must be 2-D|size mismatch.*\[0\]|got mixed torch\.Tensor and DTensor",
        "a sharded parameter was used outside of its unit, while it was not gathered",
        "call the unit's forward, not a submodule's; keep tied weights in one unit",
    ),
    Signature(
        "E21",
        r"data is not allocated yet|mutable_data|out of bounds for storage of size 0",
        "a method other than forward ran on a sharded model, past the hooks that gather its parameters",
        "go through forward, or gather the parameters first (FSDP2: unshard())",
    ),
    Signature(
        "E22",
        r"found (?:at least two|two different) devices",
        "tensors of two devices met in one operation",
        MOVE_THERE,
        known="general",
    ),
    Signature(
        "E22b",
        r"is not on the expected device",
        "tensors of two devices met in one operation",
        MOVE_THERE,
        known="reproduced",
    ),
    Signature(
        "E23",
        r"No inf checks were recorded|Attempting to unscale FP16 gradients",
        "the scaler of float16 met gradients that need none",
        "use it with float32 parameters under float16 autocast only; bfloat16 needs no scaler",
    ),
    Signature(
        "E24b",
        r"expected scalar type (?:Long|Int) but found \w+|expected scalar type \w+ but found (?:Long|Int)\b"
        r"|expected target dtype to be Long",
        "an operand has whole numbers where others have not, or the other way round: mostly targets or indices",
        "cast them where the batch is made: numbers of classes and indices are .long(), what a loss is regressed to is "
        ".float()",
        known="reproduced",
    ),
    Signature(
        "E24",
        r"expected scalar type \w+ but found \w+|Expected query, key, and value to have the same dtype"
        r"|must have the same dtype, but got|mixed dtype \(C\w+\): expect"
        r"|Input type \((?:c10::)?(?:Half|BFloat16|float|double)\) and (?:bias|weight) type",
        "operands have unequal types, often a buffer that mixed precision has not cast",
        "cast that buffer in forward, or keep it float32 on both sides",
    ),
)
