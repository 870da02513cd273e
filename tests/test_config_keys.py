"""The table of all keys, and the way from a misspelt key to the right one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.config_keys import OTHER_NAMES, SECTIONS, config_keys, explain_unknown, nearest_keys


def test_every_key_has_words_for_people() -> None:
    for name, key in config_keys().items():
        assert key.description and key.expected, name
        assert key.default is not None or key.optional, name


def test_every_other_name_leads_to_a_key() -> None:
    assert set(OTHER_NAMES.values()) <= set(config_keys())
    assert not set(OTHER_NAMES) & {name.rpartition(".")[2] for name in config_keys()}


@given(st.sampled_from(sorted(config_keys())), st.data())
def test_a_key_with_one_letter_missing_leads_back(name: str, data: st.DataObject) -> None:
    leaf_start = name.index(".") + 1
    place = data.draw(st.integers(leaf_start, len(name) - 1))
    misspelt = name[:place] + name[place + 1 :]
    if len(name) - leaf_start > 4 and misspelt not in config_keys():
        assert name in nearest_keys(misspelt)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("train.micro-batch", ["train.micro_batch"]),
        ("micro_batch", ["train.micro_batch"]),
        ("steps", ["train.steps", "schedule.steps"]),
        ("optimizer.steps", ["train.steps", "schedule.steps"]),
        ("batch_size", ["train.global_batch"]),
        ("checkpoint.evry", ["checkpoint.every"]),
        ("qqqq", []),
    ],
)
def test_what_a_name_probably_means(name: str, near: list[str]) -> None:
    assert nearest_keys(name) == near


def test_a_name_that_is_near_to_nothing_gets_the_names_to_choose_from() -> None:
    assert explain_unknown("track.qqqq") == "unknown key 'track.qqqq'; the keys of track are tensorboard"


def test_the_keys_are_frozen() -> None:
    """Users and their scripts type them: add to them, do not rename."""
    by_section = {
        section: [name.removeprefix(section + ".") for name in config_keys() if name.startswith(section + ".")]
        for section in SECTIONS
    }
    assert {section: " ".join(names) for section, names in by_section.items()} == {
        "train": "steps epochs max_seconds global_batch micro_batch micro_steps seed precision ema max_norm "
        "deterministic backend",
        "optimizer": "name lr weight_decay momentum beta1 beta2 eps",
        "schedule": "name warmup steps floor",
        "layout": "kind dp_replicate dp_shard tp cp pp ep sharding schedule recompute offload batchnorm compile "
        "static_graph gather prefetch ddp_bucket_mb ddp_hook powersgd_rank powersgd_start local_sgd outer_lr "
        "outer_momentum outer_nesterov context placement",
        "data": "workers text skip",
        "evaluate": "every",
        "checkpoint": "every seconds keep keep_every quota_gb failures asynchronous mirror memory_every",
        "track": "tensorboard",
        "guard": "hang hang_seconds slow_rank bad_link stopped_seconds input_seconds first_step_seconds "
        "compilation_seconds evaluation_seconds checkpoint_seconds stop_seconds restarts host_seconds join_seconds "
        "nonfinite nonfinite_limit digest_every recompute_every on_finding data mute spike spike_threshold "
        "spike_window spike_times spike_after",
    }
    assert {name: key.default for name, key in config_keys().items() if key.default is not None} == {
        "train.global_batch": 32,
        "train.seed": 0,
        "train.precision": "float32",
        "train.deterministic": False,
        "train.backend": "auto",
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "optimizer.weight_decay": 0.01,
        "optimizer.momentum": 0.0,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.eps": 1e-8,
        "schedule.name": "constant",
        "schedule.warmup": 0,
        "schedule.floor": 0.0,
        "layout.kind": "mesh",
        "layout.schedule": "1f1b",
        "layout.recompute": "none",
        "layout.offload": "none",
        "layout.compile": "none",
        "layout.static_graph": False,
        "layout.ddp_hook": "none",
        "layout.powersgd_rank": 4,
        "layout.powersgd_start": 1000,
        "layout.outer_lr": 0.7,
        "layout.outer_momentum": 0.9,
        "layout.outer_nesterov": True,
        "layout.context": "ulysses",
        "data.workers": 0,
        "data.skip": "",
        "checkpoint.seconds": 1800.0,
        "checkpoint.keep": 2,
        "checkpoint.failures": 2,
        "checkpoint.asynchronous": "auto",
        "track.tensorboard": True,
        "guard.hang": "restart",
        "guard.slow_rank": "warn",
        "guard.bad_link": "warn",
        "guard.stopped_seconds": 10.0,
        "guard.input_seconds": 600.0,
        "guard.first_step_seconds": 1800.0,
        "guard.compilation_seconds": 1800.0,
        "guard.evaluation_seconds": 1800.0,
        "guard.checkpoint_seconds": 1800.0,
        "guard.stop_seconds": 60.0,
        "guard.restarts": 3,
        "guard.host_seconds": 11.5,
        "guard.join_seconds": 600.0,
        "guard.nonfinite": "skip",
        "guard.nonfinite_limit": 10,
        "guard.digest_every": 200,
        "guard.recompute_every": 0,
        "guard.data": "stop",
        "guard.mute": "",
        "guard.spike": "log",
        "guard.spike_threshold": 10.0,
        "guard.spike_window": 100,
        "guard.spike_times": 3,
        "guard.spike_after": "stop",
    }
