"""Settings: sources and their order, unknown keys with the nearest one, and combinations that make no sense."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlkernel.data.errors import InputError
from rlkernel.data.tasks import TASKS
from rlkernel.models import Decoder, ModelConfig
from rlkernel.training.config import Settings, clip_range, dotted_keys, leaves, nearest, resolve, to_yaml
from rlkernel.training.config.methods import METHODS
from rlkernel.training.parts import assemble, read_inputs

FILE = {"model.path": "m", "data.train": "d.jsonl", "rewards": ["r.py:f"]}


def test_nothing_given_means_the_built_in_task() -> None:
    settings = resolve("grpo")
    assert settings.data.task == "arithmetic" and settings.model.path is None and not settings.rewards
    assert resolve("sft").data.task == "arithmetic"


@pytest.mark.parametrize(
    "device,changes,dtype",
    (
        ("cpu", {}, torch.float32),
        ("cuda", {}, torch.bfloat16),
        ("cuda:1", {"model.dtype": "float32"}, torch.float32),
        ("cuda", {"model.config": {"torch_dtype": "float16"}}, torch.float16),
        ("cpu", {"model.dtype": "bfloat16"}, torch.bfloat16),
    ),
)
def test_the_built_in_model_has_a_dtype_of_the_fast_kernels_on_a_gpu(
    device: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def on_the_cpu(config: ModelConfig, seed: int, device: str, std: float) -> Decoder:
        made.append((config.dtype, device))
        return from_config(config, seed=seed, std=std)

    from_config = Decoder.from_config
    monkeypatch.setattr(Decoder, "from_config", on_the_cpu)
    settings = resolve("grpo", options=changes)
    assemble(settings, read_inputs(settings), device, tmp_path)
    assert made == [(dtype, device)]


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optimizer: {lr: 1.0e-3, eps: 1.0e-6}\nrun: {seed: 1}\ntrain: {steps: 7}\n")
    settings = resolve(
        "grpo", file=file, options={**FILE, "run.seed": 2}, overrides=["run.seed=3", "optimizer.lr=1e-4"]
    )
    assert (settings.run.seed, settings.optimizer.lr, settings.optimizer.eps, settings.train.steps) == (
        3,
        1e-4,
        1e-6,
        7,
    )
    wish = next(iter(resolve("grpo").model_dump(mode="json")))
    assert wish == "algorithm"


def test_user_settings_override_those_of_the_task() -> None:
    from rlkernel.data.tasks import load_task

    wishes = load_task("arithmetic").defaults("grpo")
    plain = resolve("grpo").model_dump(mode="json")
    for key, value in wishes.items():
        found = plain
        for name in key.split("."):
            found = found[name]
        assert found == value, key
    assert resolve("grpo", overrides=["rollout.group_size=2"]).rollout.group_size == 2


def test_the_resolved_yaml_reads_back_equal(tmp_path: Path) -> None:
    settings = resolve("grpo", options=FILE, overrides=["loss.clip_high=null", "optimizer.betas=[0.8, 0.9]"])
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(settings))
    assert resolve("grpo", file=file) == settings
    assert clip_range(settings.loss.clip_high) == float("inf")


def test_the_resolved_yaml_of_a_default_run_reads_back_equal(tmp_path: Path) -> None:
    for algorithm, task in itertools.product(("grpo", "ppo", "sft", "dpo", "reward"), TASKS):
        file, made = tmp_path / "c.yaml", resolve(algorithm, overrides=[f"data.task={task}"])
        file.write_text(to_yaml(made))
        assert resolve(algorithm, file=file) == made


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("rollout.grup_size", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("train.learning_rate_schedule", None),
        ("data.trian", "data.train"),
        ("engine.page_sise", "engine.page_size"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, meant: str | None) -> None:
    with pytest.raises(InputError) as caught:
        resolve("grpo", options=FILE, overrides=[f"{key}=1"])
    assert f"unknown setting {key!r}" in str(caught.value)
    if meant is not None:
        assert f"did you mean {meant}?" in str(caught.value)


def test_unknown_keys_in_files_and_in_lists(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("rollout:\n  temprature: 1\n")
    with pytest.raises(
        InputError, match=r"c\.yaml: unknown setting 'rollout.temprature'; did you mean rollout.temperature"
    ):
        resolve("grpo", file=file)
    with pytest.raises(InputError, match=r"'rewards.0.wieght'; did you mean rewards.0.weight"):
        resolve("grpo", options=FILE, overrides=["rewards=[{function: a, wieght: 2}]"])
    assert nearest("zzz.qqqqqqqq") is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.steps"], "expected key=value"),
        (["=3"], "expected key=value"),
        (["train.steps="], "the value is empty"),
        (["train.steps=[1"], "the value is not YAML"),
        (["train.steps=abc"], "setting train.steps: input should be a valid integer"),
        (["train.steps=0"], "setting train.steps: input should be greater than or equal to 1"),
        (["optimizer.lr=nan"], "setting optimizer.lr"),
        (["optimizer.betas=[0.9, 1.5]"], r"both must lie in \[0, 1\)"),
        (["optimizer=3"], "setting optimizer"),
        (["run.seed.x=3"], "setting run.seed"),
        (["run.seed=1", "run.seed.x=3"], "run.seed is a value"),
        (["loss.type=ppo"], "setting loss.type: input should be 'grpo'"),
        (["rollout.temperature=0"], "setting rollout.temperature: input should be greater than or equal to 0.00001"),
        (["rollout.temperature=1e300"], "setting rollout.temperature: must be 0 or have a size between 1.4e-45"),
        (["eval.temperature=1e-7"], "setting eval.temperature: must be 0"),
        (["optimizer.lr=1e300"], "setting optimizer.lr: must be 0 or have a size between 1.4e-45 and 3.4e38"),
        (["optimizer.clip_norm=1e-46"], "setting optimizer.clip_norm: must be 0 or have a size"),
        (['rollout.stop=[""]'], "setting rollout.stop.0: string should have at least 1 character"),
        (["run.seed=" + "9" * 5000], "the value is not YAML"),
        (["run.seed=" + "[" * 5000], "the value is not YAML"),
        (["run.seed=!!int x"], "the value is not YAML"),
        (["data.task=arithmetic"], "exclude each other"),
        (["data.heldout=h.jsonl", "data.heldout_rows=3"], "leave one of them out"),
        (["data.task=arithmetic", "data.train=null", "data.heldout=h.jsonl"], "has its own held-out rows"),
        (["data.train=null"], "no data"),
        (["model.path=null"], "model.path is missing"),
        (["rewards=[]"], "no reward"),
        (["model.config={hidden_size: 3}"], "it has no effect"),
        (["rewards=[{model: r}]", "reward_pool.workers=2"], "reward_pool has no effect"),
        (["kl.target=2"], "kl.target has no effect with kl.controller=fixed"),
        (["rollout.max_turns=2"], "rollout.max_turns has no effect with rollout.environment=null"),
        (["model.lora.alpha=8"], "model.lora.alpha has no effect with model.lora.rank=0"),
        (["warmup.steps=3"], "warmup.steps needs warmup.data"),
        (["rollout.group_size=1"], "rollout.group_size=1 with advantages.mode=group makes every advantage zero"),
        (["rollout.group_size=1", "advantages.mode=batch"], "every advantage zero"),
        (["train.minibatches=999"], "train.minibatches=999 exceeds the 128 completions"),
        (["loss.tis_cap=2"], "set loss.old_policy=scored"),
        (["loss.clip_dual=1.1"], "must exceed 1"),
        (["loss.clip_dual=3", "loss.clip_high=null"], "must exceed 1"),
        (["loss.clip_dual=3", "loss.type=cispo"], "no dual clip"),
        (["algorithm=sft"], "the command trains 'grpo'"),
    ],
)
def test_bad_settings_are_errors(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve("grpo", options=FILE, overrides=words)


@pytest.mark.parametrize("method", METHODS)
def test_a_methods_settings_stand_below_the_users(method: str) -> None:
    found = dict(leaves(resolve("grpo", options=FILE, overrides=[f"method={method}"]).model_dump(mode="json")))
    assert {key: found[key] for key in METHODS[method]} == METHODS[method]
    assert resolve("grpo", options=FILE, overrides=[f"method={method}", "loss.clip_high=0.3"]).loss.clip_high == 0.3


def test_ppo_has_defaults_of_its_own() -> None:
    settings = resolve("ppo", options=FILE)
    assert (settings.rollout.group_size, settings.train.epochs, settings.kl.coef) == (1, 4, 0.05)
    assert resolve("ppo").rollout.group_size == 8, "the built-in task's"
    for words, message in (
        (["method=rloo"], r"train ppo does not read method; leave it out \(it belongs to train grpo\)"),
        (["kl.coef=0", "kl.controller=adaptive"], r"kl\.controller=adaptive multiplies kl\.coef, which is 0"),
        (["rewards=[]"], "no reward"),
        (["ppo.lam=1.5"], r"setting ppo\.lam"),
    ):
        with pytest.raises(InputError, match=message):
            resolve("ppo", options=FILE, overrides=words)


@pytest.mark.parametrize(
    ("algorithm", "word", "key"),
    [
        ("ppo", "advantages.normalize_std=false", "advantages.normalize_std"),
        ("grpo", "ppo.lam=0.9", "ppo.lam"),
        ("grpo", "train.batch_size=8", "train.batch_size"),
        ("sft", "train.epochs=3", "train.epochs"),
        ("sft", "rewards=[math]", "rewards"),
        ("dpo", "loss.kl_coef=0.1", "loss.kl_coef"),
        ("reward", "warmup.steps=3", "warmup.steps"),
    ],
)
def test_a_setting_that_the_algorithm_ignores_is_an_error(algorithm: str, word: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"^train {algorithm} does not read {key}; leave it out"):
        resolve(algorithm, overrides=["data.task=arithmetic", word])


def test_a_group_of_one_is_fine_without_a_baseline() -> None:
    for words in ("advantages.mode=none", "method=reinforce++"):
        assert resolve("grpo", options=FILE, overrides=["rollout.group_size=1", words])


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        resolve("grpo", file=tmp_path / "absent.yaml")
    for text, message in (
        ("a: [1", "is not YAML"),
        ("- 1", "must hold a mapping, got list|must hold a mapping of settings"),
    ):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            resolve("grpo", file=file)
    (tmp_path / "e.yaml").write_text("")
    assert resolve("grpo", file=tmp_path / "e.yaml") == resolve("grpo")
    with pytest.raises(InputError, match=r"setting data\.task: task 'chess' does not exist"):
        resolve("grpo", overrides=["data.task=chess"])


def test_every_setting_is_in_the_guide() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
    bare = Settings.model_construct().model_dump(mode="json")
    for key, description in dotted_keys():
        value: Any = bare
        for name in key.split("."):
            value = value[name]
        row = f"| `{key}` | `{json.dumps(value)}` | {description} |"
        assert description and row in page, f"docs/guides/training.md lacks the row {row}"
    assert set(yaml.safe_load(to_yaml(resolve("grpo")))) == set(Settings.model_fields)


def files_of(folder: Path, rows: list[dict[str, Any]], reward: str, *overrides: str) -> Settings:
    """Settings of a run on files: `rows` as data.train, a function with the parameters `reward`."""
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.py").write_text(f"def f({reward}):\n    return [1.0] * len(completions)\n")
    options = {"model.path": "m", "data.train": str(folder / "d.jsonl"), "rewards": [f"{folder / 'r.py'}:f"]}
    return resolve("grpo", options=options, overrides=overrides)


def test_equal_prompts_are_trained_on(tmp_path: Path) -> None:
    equal = [{"prompt": "same", "n": i} for i in range(40)]
    inputs = read_inputs(files_of(tmp_path, equal, "completions, n"))
    assert len(list(inputs.train)) == 40 and not inputs.heldout
    inputs = read_inputs(
        files_of(tmp_path, [*equal, *({"prompt": str(i), "n": 0} for i in range(9))], "completions, n")
    )
    assert 0 < len(list(inputs.train)) < 49 and len(inputs.heldout) == 1
    with pytest.raises(InputError, match=r"data\.heldout_rows=2 leaves no .* \(different prompts: 1\); ask for fewer"):
        read_inputs(files_of(tmp_path, equal, "completions, n", "data.heldout_rows=2"))


@pytest.mark.parametrize("value", ["abc", "-1", ".inf", ".nan", "1e-2", "true"])
def test_a_deviation_that_is_no_number_is_an_error(tmp_path: Path, value: str) -> None:
    settings = resolve("grpo", overrides=[f"model.config={{initializer_range: {value}}}"])
    with pytest.raises(InputError, match=r"model\.config: initializer_range is .*; expected a finite number"):
        assemble(settings, read_inputs(settings), "cpu", tmp_path)


def test_a_model_key_that_nothing_reads_is_an_error(tmp_path: Path) -> None:
    settings = resolve("grpo", overrides=["model.config={hiden_size: 64}"])
    with pytest.raises(InputError, match=r"model\.config: no model reads 'hiden_size'; .* hidden_size, "):
        assemble(settings, read_inputs(settings), "cpu", tmp_path)


def test_text_that_is_not_unicode_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text('{"prompt": "1", "completion": "2"}\n{"prompt": "1\\ud800", "completion": "2"}\n')
    settings = resolve("grpo", overrides=[f"warmup.data={file}", "warmup.steps=1"])
    with pytest.raises(InputError, match=r"e\.jsonl:2: column 'prompt' holds .* half of a surrogate pair"):
        read_inputs(settings)


def test_a_reward_that_lacks_a_column_is_named_before_any_work(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "n": i} for i in range(3)]
    (tmp_path / "h.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(InputError, match=r"reward f: it takes 'n', which .*h\.jsonl lacks"):
        read_inputs(files_of(tmp_path, rows, "completions, n", f"data.heldout={tmp_path / 'h.jsonl'}"))
    with pytest.raises(InputError, match="reward f: it takes 'n', which task arithmetic lacks"):
        read_inputs(resolve("grpo", overrides=["data.task=arithmetic", f"rewards=['{tmp_path / 'r.py'}:f']"]))
    read_inputs(files_of(tmp_path, rows, "completions, n, trainer_state, log_metric, log_extra"))
