"""Four layers into one Config; every mistake is one line with the key, the place and the nearest that is right."""

from pathlib import Path

import pytest

from allranks.config import (
    Config,
    changed_keys,
    check_resumable,
    check_text,
    is_resumable,
    override_config,
    read_config,
    read_task_spec,
    render_layout,
    resolve_config,
    write_config,
)
from allranks.config_keys import config_keys
from allranks.errors import ConfigError, RunError


def resolve(*overrides: str, layout: str | None = None, defaults: dict[str, object] | None = None) -> Config:
    return resolve_config(task_defaults=defaults or {}, toml=None, overrides=overrides, layout=layout)


def resolve_text(text: str, folder: Path, *overrides: str) -> Config:
    toml = folder / "run.toml"
    toml.write_text(text, encoding="utf-8")
    return resolve_config(task_defaults={}, toml=toml, overrides=overrides)


DEGREE = "expected a whole number of at least 1 or '*'"
PRECISIONS = "expected one of float32, bfloat16, float16, float8, float64"

BAD_ARGUMENTS = [
    ("train.stps=5", "unknown key 'train.stps'; did you mean 'train.steps=5'?"),
    (
        "layout.placement.blocks.0=cpu:1",
        "unknown key 'layout.placement.blocks.0'; did you mean 'layout.placement={\"blocks.0\" = \"cpu:1\"}'?",
    ),
    ("train.micro-batch=4", "unknown key 'train.micro-batch'; did you mean 'train.micro_batch=4'?"),
    ("micro_batch=4", "unknown key 'micro_batch'; did you mean 'train.micro_batch=4'?"),
    ("lr=1e-3", "unknown key 'lr'; did you mean 'optimizer.lr=1e-3'?"),
    ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'optimizer.lr=1'?"),
    ("train.batch_size=8", "unknown key 'train.batch_size'; did you mean 'train.global_batch=8'?"),
    ("steps=8", "unknown key 'steps'; did you mean 'train.steps' or 'schedule.steps'?"),
    ("TRAIN.STEPS=8", "unknown key 'TRAIN.STEPS'; did you mean 'train.steps=8'?"),
    ("optimiser.lr=1", "unknown key 'optimiser.lr'; did you mean 'optimizer.lr=1'?"),
    (
        "checkpoint.qqqq=1",
        "unknown key 'checkpoint.qqqq'; the keys of checkpoint are every, seconds, keep, keep_every, quota_gb, "
        "failures, asynchronous, mirror, memory_every",
    ),
    (
        "guard.qqqq=1",
        "unknown key 'guard.qqqq'; the keys of guard are hang, hang_seconds, slow_rank, bad_link, stopped_seconds, "
        "input_seconds, first_step_seconds, compilation_seconds, evaluation_seconds, checkpoint_seconds, "
        "stop_seconds, restarts, host_seconds, join_seconds, nonfinite, nonfinite_limit, digest_every, "
        "recompute_every, on_finding, data, "
        "mute, spike, spike_threshold, spike_window, spike_times, spike_after",
    ),
    ("trian.qqqq=1", "unknown key 'trian.qqqq'; did you mean 'train'?"),
    (
        "zzzz.qqqq=1",
        "unknown key 'zzzz.qqqq'; the sections are train, optimizer, schedule, layout, data, evaluate, checkpoint, "
        "track, guard, task",
    ),
    ("train.steps=1e3", "train.steps = 1000.0: expected a whole number of at least 1: write 1000"),
    ("train.steps=4.5", "train.steps = 4.5: expected a whole number of at least 1"),
    ("train.steps=-1", "train.steps = -1: expected a whole number of at least 1"),
    ("train.steps=0", "train.steps = 0: expected a whole number of at least 1"),
    ("train.steps=many", "train.steps = 'many': expected a whole number of at least 1"),
    ("train.steps=true", "train.steps = true: expected a whole number of at least 1"),
    ("train.steps=", "train.steps = '': expected a whole number of at least 1"),
    ("train.steps='4'", "train.steps = '4': expected a whole number of at least 1: write it without quotes"),
    ("train.steps=[1, 2]", "train.steps = [1, 2]: expected a whole number of at least 1"),
    ("train.steps=2\nx=3", "train.steps = '2\\nx=3': expected a whole number of at least 1"),
    ("train.seed=-1", "train.seed = -1: expected a whole number of at least 0"),
    ("train.seed=none", "train.seed = 'none': expected a whole number of at least 0"),
    (f"train.seed={2**63}", f"train.seed = {2**63}: expected a whole number of at least 0"),
    ("train.global_batch=0", "train.global_batch = 0: expected a whole number of at least 1"),
    ("train.max_norm=0", "train.max_norm = 0: expected a number above 0"),
    ("train.max_norm=nan", "train.max_norm = nan: expected a number above 0"),
    ("optimizer.lr=inf", "optimizer.lr = inf: expected a number above 0"),
    ("optimizer.lr=-1e-3", "optimizer.lr = -0.001: expected a number above 0"),
    ("optimizer.beta1=1", "optimizer.beta1 = 1: expected a number of at least 0 and below 1"),
    ("optimizer.name=adm", "optimizer.name = 'adm': expected one of adamw, adam, sgd; did you mean 'adam'?"),
    ("schedule.floor=1.5", "schedule.floor = 1.5: expected a number of at least 0 and of at most 1"),
    ("train.precision=bf16", f"train.precision = 'bf16': {PRECISIONS}; did you mean 'bfloat16'?"),
    ("train.precision=16", f"train.precision = 16: {PRECISIONS}"),
    ("train.ema=1", "train.ema = 1: expected a number above 0 and below 1"),
    ("train.deterministic=1", "train.deterministic = 1: expected true or false"),
    ("train.deterministic=True", "train.deterministic = 'True': expected true or false: write true"),
    ("track.tensorboard=no", "track.tensorboard = 'no': expected true or false"),
    ("data.workers=-2", "data.workers = -2: expected a whole number of at least 0"),
    (
        "guard.mute=linkage,replica",
        "guard.mute=linkage,replica: no sentinel is called 'replica'; there are replicas, shards, samples, randomness, "
        "linkage, schedule, steps, checkpoint, gradients",
    ),
    ("guard.on_finding=ignore", "guard.on_finding = 'ignore': expected one of stop, warn"),
    ("layout.tp=0", f"layout.tp = 0: {DEGREE}"),
    ("layout.ep=*", "layout.ep = '*': expected a whole number of at least 1"),
    ("layout.gather=float16", "layout.gather = 'float16': expected one of float32, bfloat16; did you mean 'bfloat16'?"),
    ("train=5", "train is a section, not a key, for example train.steps=..."),
    ("task=mine.py", "the task is an argument of its own: write mine.py"),
    ("train.steps", "expected key=value, for example train.steps=100"),
    ("=5", "expected key=value, for example train.steps=100"),
]


@pytest.mark.parametrize(("argument", "message"), BAD_ARGUMENTS, ids=[argument for argument, _ in BAD_ARGUMENTS])
def test_a_bad_argument_is_named_with_what_is_right(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(argument)
    assert str(caught.value) == f"argument '{argument}': {message}"


def test_an_empty_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--layout: the layout is empty; write for example ddp, fsdp or "):
        resolve(layout=" ")


BAD_FILES = [
    (
        "track.tensorboard = 'true'",
        " line 1: track.tensorboard = 'true': expected true or false: write it without quotes",
    ),
    ("[train]\nsteps == 3\n", " line 2: not valid TOML: invalid value: steps == 3"),
    ("[train\n", " line 1: not valid TOML: expected ']' at the end of a table declaration: [train"),
    ("[train]\nstep = 3\n", " line 2: unknown key 'train.step'; did you mean 'train.steps'?"),
    ("train.step = 3\n", " line 1: unknown key 'train.step'; did you mean 'train.steps'?"),
    ("[trian]\nsteps = 3\n", ": unknown key 'trian'; did you mean 'train'?"),
    (
        "[train]\n\nsteps = '3'\n",
        " line 3: train.steps = '3': expected a whole number of at least 1: write it without quotes",
    ),
    (
        "[train]\nsteps = 3\n[schedule]\nsteps = 1.0",
        ": schedule.steps = 1.0: expected a whole number of at least 1: write 1",
    ),
    ("train = 3\n", " line 1: train = 3: train is a section; write its keys, as in [train]"),
    ("[task]\nspec = 3\n", ' line 2: the task is named by a text such as "file.py:Name"'),
    ("layout = 'tp=0'\n", f": layout 'tp=0': tp=0, {DEGREE}"),
    ("[layout]\ntp = '*'\npp = '*'\n", ": tp and pp both take what is left (*): only one axis can"),
    ("[train.steps]\nx = 3\n", ": train.steps = {'x': 3}: expected a whole number of at least 1"),
    (
        "[train]\nsteps = 3\nepochs = 2\n",
        " line 2 and {toml} line 3: train.steps = 3 and train.epochs = 2 are both given: "
        "a run has one length, give one of them",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=[repr(text) for text, _ in BAD_FILES])
def test_a_bad_file_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_text(text, tmp_path)
    toml = str(tmp_path / "run.toml")
    assert str(caught.value) == toml + message.replace("{toml}", toml)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'task = "\xe9"')
    for name, reason in (("none.toml", "no such file"), ("latin.toml", "not valid TOML: it is not UTF-8 text")):
        with pytest.raises(ConfigError) as caught:
            resolve_config(task_defaults={}, toml=tmp_path / name, overrides=())
        assert str(caught.value) == f"{tmp_path / name}: {reason}"
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        resolve_config(task_defaults={}, toml=tmp_path, overrides=())


def test_a_bad_default_of_the_task_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(defaults={"train.stps": 4})
    assert str(caught.value) == "Task.defaults: unknown key 'train.stps'; did you mean 'train.steps'?"


def test_steps_and_epochs_of_one_layer_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("train.steps=3", "train.epochs=2")
    assert str(caught.value) == (
        "argument 'train.steps=3' and argument 'train.epochs=2': train.steps = 3 and train.epochs = 2 are both given: "
        "a run has one length, give one of them"
    )


def test_layers_beat_each_other_in_order(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[train]\nseed = 2\nglobal_batch = 20\n[optimizer]\nlr = 1\n")
    config = resolve_config(
        task_defaults={"train.seed": 1, "train.global_batch": 10, "data": {"workers": 3}},
        toml=toml,
        overrides=["train.seed=3", "train.seed=4"],
    )
    assert (config.train.seed, config.train.global_batch, config.data.workers) == (4, 20, 3)
    assert config.optimizer.lr == 1
    assert config.optimizer.name == "adamw"


def test_without_a_length_a_run_is_one_epoch() -> None:
    assert (resolve().train.steps, resolve().train.epochs) == (None, 1)
    assert (Config().train.steps, Config().train.epochs) == (None, 1)


def test_a_length_displaces_the_other_length_of_a_lower_layer() -> None:
    config = resolve("train.steps=7", defaults={"train.epochs": 3})
    assert (config.train.steps, config.train.epochs) == (7, None)
    config = resolve("train.epochs=7", defaults={"train.steps": 3})
    assert (config.train.steps, config.train.epochs) == (None, 7)


def test_none_takes_back_what_a_lower_layer_gave() -> None:
    assert resolve("train.max_norm=none", defaults={"train.max_norm": 1.0}).train.max_norm is None
    assert resolve("layout.sharding=none").layout.sharding == "none"


def test_words_need_no_quotes_and_values_keep_their_type() -> None:
    config = resolve(
        "data.text=src/**/*.py", "task.width=256", "task.rate=1e-3", "task.name=big", "task.on=true", "task.x=[1, 'a']"
    )
    assert config.data.text == "src/**/*.py"
    assert config.task == {"width": 256, "rate": 1e-3, "name": "big", "on": True, "x": [1, "a"]}
    assert resolve("data.text=123").data.text == "123"
    assert resolve("data.text=a=b").data.text == "a=b"


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        resolve().train.steps = 3


def test_a_layout_string_replaces_degrees_and_sharding_and_keeps_the_other_modes(tmp_path: Path) -> None:
    text = "layout = 'dp_shard=4,tp=2,sharding=grad_op,recompute=full'\n"
    assert render_layout(resolve_text(text, tmp_path).layout) == "dp_shard=4,tp=2,sharding=grad_op,recompute=full"
    assert render_layout(resolve_text(text, tmp_path, "layout=ddp").layout) == "dp_replicate=*,recompute=full"
    assert render_layout(resolve_text(text, tmp_path, "layout.tp=1").layout).startswith("dp_shard=4,sharding")
    assert not resolve_text(text, tmp_path, "layout=auto").layout.chosen


# Files


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config = resolve(
        "train.steps=5",
        "layout=hsdp,sharding=grad_op",
        'task.name="a \\"quoted\\" name\\n\\u007f"',
        "task.x.y=3",
        "task.table={a = [1, 2.5], b = true}",
        "optimizer.lr=3e-40",
    )
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config


def test_a_setting_that_toml_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written to TOML"):
        write_config(Config(task={"x": object()}), tmp_path / "config.toml")
    assert not (tmp_path / "config.toml").exists()


@pytest.mark.parametrize("text", ['task = "my/task.py:Name"', '[task]\nspec = "my/task.py:Name"\nwidth = 3'])
def test_a_toml_file_names_its_task_relative_to_itself(text: str, tmp_path: Path) -> None:
    config = resolve_text(text, tmp_path)
    assert config.task_spec == read_task_spec(tmp_path / "run.toml") == f"{tmp_path}/my/task.py:Name"
    assert config.task == ({"width": 3} if "width" in text else {})


def test_a_module_as_task_stays_as_it_is_and_no_task_is_none(tmp_path: Path) -> None:
    assert resolve_text('task = "package.module:Name"', tmp_path).task_spec == "package.module:Name"
    resolve_text("[train]\nsteps = 3", tmp_path)
    assert read_task_spec(tmp_path / "run.toml") is None


# Resume


def test_the_schedule_ends_at_the_first_steps_and_stays_there_at_a_resume() -> None:
    first = resolve("train.steps=100")
    assert first.schedule.steps == 100
    assert override_config(first, ["train.steps=200"]).schedule.steps == 100
    again = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=200"], kept=first)
    assert (again.train.steps, again.schedule.steps) == (200, 100)
    assert override_config(resolve("train.epochs=2"), ["train.steps=200"]).schedule.steps is None


def test_a_resume_keeps_everything_that_the_command_line_does_not_name() -> None:
    first = resolve("train.epochs=4", "layout=fsdp", "task.width=3", "train.max_norm=1.5", "optimizer.lr=2")
    assert override_config(first, []) == first
    second = override_config(first, ["train.steps=9"], layout="ddp")
    assert changed_keys(first, second) == {
        "train.steps": (None, 9),
        "train.epochs": (4, None),
        "layout.dp_replicate": (1, "*"),
        "layout.dp_shard": ("*", 1),
    }
    check_resumable(first, second)


def test_nan_is_no_change() -> None:
    first = resolve("task.missing=nan", "task.values=[1.0, nan]")
    again = resolve("task.missing=nan", "task.values=[1.0, nan]")
    assert changed_keys(first, again) == {}
    assert list(changed_keys(first, resolve("task.missing=0.0", "task.values=[nan, 1.0]"))) == [
        "task.missing",
        "task.values",
    ]


def test_a_resume_that_changes_the_meaning_needs_a_word() -> None:
    first = resolve("task.width=3")
    second = override_config(first, ["train.global_batch=64", "task.width=4", "task.depth=1", "checkpoint.every=5"])
    with pytest.raises(RunError) as caught:
        check_resumable(first, second, change=["task.width"])
    assert str(caught.value) == (
        "the run was started with another configuration: train.global_batch 32 -> 64, task.depth not set -> 1; "
        "keep it, or add --change train.global_batch --change task.depth"
    )
    check_resumable(first, second, change=["task.width", "task.depth", "train.global_batch"])


def test_the_meaning_of_batch_statistics_is_no_free_part_of_the_layout() -> None:
    first = resolve("layout=ddp")
    second = override_config(first, [], layout="fsdp,batchnorm=local")
    with pytest.raises(RunError, match=r"layout\.batchnorm not set -> 'local'; keep it, or add --change"):
        check_resumable(first, second)
    check_resumable(first, second, change=["layout.batchnorm"])
    assert override_config(second, [], layout="ddp").layout.batchnorm == "local"


def test_a_change_of_no_key_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        check_resumable(resolve(), resolve(), change=["train.batch"])
    assert str(caught.value).startswith("--change train.batch: unknown key 'train.batch'; did you mean 'train.")


def test_what_a_resume_may_change_is_frozen() -> None:
    free = {name for name in config_keys() if is_resumable(name) and not name.startswith("layout.")}
    assert free == {
        "train.steps",
        "train.epochs",
        "train.max_seconds",
        "data.workers",
        "evaluate.every",
        "checkpoint.every",
        "checkpoint.seconds",
        "checkpoint.asynchronous",
        "checkpoint.mirror",
        "checkpoint.memory_every",
        "checkpoint.keep",
        "checkpoint.failures",
        "checkpoint.keep_every",
        "checkpoint.quota_gb",
        "track.tensorboard",
        *(name for name in config_keys() if name.startswith("guard.")),
    }
    meant = {name for name in config_keys() if name.startswith("layout.") and not is_resumable(name)}
    names = "batchnorm ddp_hook powersgd_rank powersgd_start local_sgd outer_lr outer_momentum outer_nesterov"
    assert meant == {f"layout.{name}" for name in names.split()}


@pytest.mark.parametrize("word", ["data.text=caf\udce9*", 'task.files=["a", "caf\udce9"]'])
def test_what_a_file_cannot_hold_is_refused_by_its_key(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{word.partition('=')[0]}=.*udce9.* has bytes that are no UTF-8"):
        check_text(resolve(word))
    check_text(resolve("data.text=caf\u00e9*"))
