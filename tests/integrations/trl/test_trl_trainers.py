"""The flag on TRL's trainers without vLLM: rlkernel's engine as rollout_func, on against off, refusals, resume."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from trl_side import history, make_trainer, settings, weights_hash

import rlkernel_transformers
import rlkernel_trl
import rlkernel_vllm
from rlkernel_trl import ExactnessLostError, MismatchError

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), head_dim=32)


def assert_exact(rows: list[dict[str, float]], steps: int) -> None:
    assert len(rows) == steps
    for row in rows:
        assert row["rlkernel/exact_frac"] == 1.0
        assert row["rlkernel/mismatch_tokens"] == 0 and row["rlkernel/drift_max"] == 0
        assert row["rlkernel/fallbacks"] == 0
        assert row["sampling/sampling_logp_difference/max"] == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_with_the_engine(model: Path, loss: str, compat: Any) -> None:
    level = "sequence" if loss == "luspo" else "token"
    trainer = make_trainer("GRPO", model, engine=True, loss_type=loss, importance_sampling_level=level)
    before = weights_hash(trainer.model)
    trainer.train()
    assert_exact(history(trainer), 3)
    assert any(row["grad_norm"] > 0 for row in history(trainer))
    assert weights_hash(trainer.model) != before
    compat.exact("TRL", f"engine as rollout_func: loss {loss}")


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.04},
        {"num_iterations": 2},
        {"steps_per_generation": 2},
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5, "beta": 0.04, "num_iterations": 2},
        {"min_p": 0.05, "top_entropy_quantile": 0.5},
        {"bf16": False},
        {"mask_truncated_completions": True},
        {"entropy_coef": 0.01, "off_policy_mask_threshold": 0.5},
    ],
    ids=str,
)
def test_settings_with_the_engine(model: Path, changes: dict[str, Any], compat: Any) -> None:
    trainer = make_trainer("GRPO", model, engine=True, max_steps=4, **changes)
    trainer.train()
    compared = [row for row in history(trainer) if "rlkernel/exact_frac" in row]
    assert compared
    assert_exact(compared, len(compared))
    compat.exact("TRL", f"engine as rollout_func: {', '.join(f'{k}={v}' for k, v in changes.items())}")


def test_evaluation_is_compared(model: Path, compat: Any) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": "name a colour"}] * 4)
    trainer = make_trainer(
        "GRPO", model, engine=True, max_steps=1, per_device_eval_batch_size=4, trainer={"eval_dataset": rows}
    )
    found = trainer.evaluate()
    assert found["eval_rlkernel/exact_frac"] == 1.0
    assert found["eval_sampling/sampling_logp_difference/max"] == 0
    compat.exact("TRL", "evaluation")


def test_an_evaluation_between_the_updates_of_a_generation(model: Path) -> None:
    from datasets import Dataset

    trainer = make_trainer(
        "GRPO",
        model,
        engine=True,
        top_p=0.9,
        num_iterations=2,
        steps_per_generation=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        trainer={"eval_dataset": Dataset.from_list([{"prompt": "name a colour red"}] * 4)},
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_rlkernel/exact_frac" in row]
    assert len(rows) == 4 and all(row["eval_rlkernel/exact_frac"] == 1.0 for row in rows)
    compared = [row for row in history(trainer) if "rlkernel/exact_frac" in row]
    assert_exact(compared, 1)


def test_a_model_without_a_forward_is_refused(tmp_path: Path, compat: Any) -> None:
    import transformers

    make_model(tmp_path)
    config = transformers.GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as raised:
        make_trainer("SFT", tmp_path, rl_kernel_strict=False)
    compat.refused("TRL", "another architecture (GPT-2)", raised.value, "GPT2LMHeadModel")


def _wrong(trainer: Any, prompts: Any) -> dict[str, Any]:
    out = rlkernel_trl.rollout_func()(prompts, trainer)
    value = torch.tensor(out["logprobs"][1][2])
    out["logprobs"][1][2] = float(torch.nextafter(value, torch.tensor(0.0)))
    return out


def test_strict_stops_before_the_update(model: Path, compat: Any) -> None:
    trainer = make_trainer("GRPO", model, trainer={"rollout_func": lambda prompts, t: _wrong(t, prompts)})
    before = weights_hash(trainer.model)
    with pytest.raises(MismatchError) as raised:
        trainer.train()
    assert weights_hash(trainer.model) == before
    named = r"1 of \d+ sampled tokens .* token 2 \(id \d+\): rollout -"
    compat.refused("TRL", "an update after one token of another bit, strict", raised.value, named)


def test_not_strict_counts(model: Path, compat: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(
        "GRPO", model, rl_kernel_strict=False, trainer={"rollout_func": lambda prompts, t: _wrong(t, prompts)}
    )
    trainer.train()
    for row in history(trainer):
        assert row["rlkernel/mismatch_tokens"] == 1 and 0 < row["rlkernel/exact_frac"] < 1
        assert row["rlkernel/drift_max"] == row["sampling/sampling_logp_difference/max"] > 0
    assert "another log-probability" in caplog.text
    compat.audited("TRL", "an update after one token of another bit, not strict", [caplog.text])


@pytest.mark.parametrize("algorithm", ["SFT", "DPO"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_agrees_with_off(model: Path, algorithm: str, dtype: str, compat: Any) -> None:
    """Losses and gradient norms of short runs; fp32 to five digits, bf16 within the rounding of autocast."""
    bf16 = dtype == "bfloat16"
    found = []
    for flag in (True, False):
        trainer = make_trainer(algorithm, model, flag, bf16=bf16, learning_rate=1e-4)
        trainer.train()
        found.append(history(trainer))
    tolerance = 2e-2 if bf16 else 2e-5
    for on, off in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy"):
            slack = 0.3 if name == "mean_token_accuracy" and bf16 else 1e-6
            assert math.isclose(on[name], off[name], rel_tol=tolerance, abs_tol=slack), (name, on, off)
        assert on["rlkernel/fallbacks"] == 0
    if algorithm == "DPO":
        for name in ("logps/chosen", "logits/chosen", "rewards/margins"):
            assert math.isclose(found[0][0][name], found[1][0][name], rel_tol=tolerance, abs_tol=1e-3), name
    compat.close("TRL", f"{algorithm}, flag on against off, {dtype}: loss, gradient norm")


@pytest.mark.parametrize(
    "changes", [{"loss_type": ["sigmoid", "sft"]}, {"use_weighting": True}, {"precompute_ref_log_probs": True}], ids=str
)
def test_dpo_variants(model: Path, changes: dict[str, Any]) -> None:
    found = []
    for flag in (True, False):
        trainer = make_trainer("DPO", model, flag, bf16=False, max_steps=2, **changes)
        trainer.train()
        found.append([row["loss"] for row in history(trainer)])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", [{"packing": True}, {"padding_free": True, "max_length": None}], ids=str)
def test_sft_without_padding(model: Path, changes: dict[str, Any]) -> None:
    """Packed rows of several sequences score like padded ones."""
    found = []
    for extra in (changes, {}):
        trainer = make_trainer("SFT", model, bf16=False, max_steps=1, loss_type="dft", **extra)
        trainer.train()
        assert history(trainer)[0]["rlkernel/fallbacks"] == 0
        found.append(history(trainer)[0]["loss"])
    if "packing" not in changes:
        assert math.isclose(*found, rel_tol=1e-6)


def test_grpo_on_agrees_with_off(model: Path, compat: Any) -> None:
    """The same rollouts, kept and replayed, through the trainer with the flag and through TRL's own."""
    saved: list[dict[str, Any]] = []
    ours = rlkernel_trl.rollout_func()

    def record(prompts: Any, trainer: Any) -> dict[str, Any]:
        saved.append(ours(prompts, trainer))
        return saved[-1]

    on = make_trainer("GRPO", model, bf16=False, max_steps=1, beta=0.04, trainer={"rollout_func": record})
    on.train()
    replay = lambda prompts, trainer: dict(saved[0])
    off = make_trainer("GRPO", model, False, bf16=False, max_steps=1, beta=0.04, trainer={"rollout_func": replay})
    off.train()
    for name in ("loss", "grad_norm", "entropy", "kl", "reward"):
        assert math.isclose(history(on)[0][name], history(off)[0][name], rel_tol=1e-4, abs_tol=1e-6), name
    compat.close("TRL", "GRPO, flag on against off, float32: loss, gradient norm, KL")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rloo_on_agrees_with_off(model: Path, dtype: str, compat: Any) -> None:
    """What rlkernel's engine samples under the flag is replayed without it."""
    bf16, saved, found = dtype == "bfloat16", [], []
    for flag in (True, False):
        trainer = make_trainer("RLOO", model, flag, bf16=bf16, max_steps=2, beta=0.04)
        sample, turns = trainer._generate_single_turn, iter(tuple(saved))

        def record(*args: Any, sample: Any = sample) -> Any:
            saved.append(sample(*args))
            return saved[-1]

        trainer._generate_single_turn = record if flag else lambda *args, turns=turns: next(turns)
        trainer.train()
        found.append(history(trainer))
    for on, off in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "reward"):
            close = math.isclose(on[name], off[name], rel_tol=3e-2 if bf16 else 1e-4, abs_tol=1e-2 if bf16 else 1e-6)
            assert close, (name, on, off)
        assert on["rlkernel/fallbacks"] == 0
    compat.close("TRL", f"RLOO, flag on against off, {dtype}: loss, gradient norm, KL")


@pytest.mark.parametrize("algorithm", ["SFT", "DPO", "GRPO", "RLOO"])
def test_off_is_trl(model: Path, algorithm: str, compat: Any) -> None:
    """Without the flag the classes of this package compute what TRL's compute, to the bit, and keep nothing."""
    import trl

    hashes = []
    for package in (rlkernel_trl, trl):
        trainer = make_trainer(algorithm, model, False, package=package)
        trainer.train()
        assert not any(name.startswith("rlkernel") for row in history(trainer) for name in row)
        assert getattr(trainer, "_rl_kernel", None) is None
        hashes.append(weights_hash(trainer.model))
    assert hashes[0] == hashes[1]
    compat.exact("TRL", f"{algorithm}, flag off against TRL's own trainer: trained weights")


def test_resume(model: Path, tmp_path: Path, compat: Any) -> None:
    """A run continued from a checkpoint ends in the weights of the one that was not interrupted."""
    whole = make_trainer("GRPO", model, engine=True, max_steps=4)
    whole.train()
    part = make_trainer(
        "GRPO", model, engine=True, max_steps=4, save_strategy="steps", save_steps=2, output_dir=str(tmp_path)
    )
    part.train()
    again = make_trainer("GRPO", model, engine=True, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert weights_hash(whole.model) == weights_hash(part.model) == weights_hash(again.model)
    compat.exact("TRL", "engine as rollout_func: weights of a resumed run")


def test_masters_are_fp32(model: Path) -> None:
    """bf16 weights follow fp32 masters that start at the checkpoint's fp32 values, so tiny steps are not lost."""
    trainer = make_trainer("SFT", model, learning_rate=1e-6, max_steps=2, max_grad_norm=0.0)
    trainer.train()
    state = trainer.optimizer.state
    p = next(iter(trainer.model.parameters()))
    assert p.dtype == torch.bfloat16
    master = state[p]["master"]
    assert master.dtype == torch.float32 and not torch.equal(master, p.float())
    assert torch.equal(master.to(torch.bfloat16), p)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16": True, "bf16": False}, "fp16"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"torch_compile": True}, "torch_compile"),
        ({"temperature": 0.0}, "temperature=0.0: sampling and training divide"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"optim": "sgd"}, "fp32 masters"),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"model_init_kwargs": {"dtype": "float16"}, "bf16": False}, "float16"),
    ],
    ids=str,
)
def test_refusals(model: Path, changes: dict[str, Any], message: str, compat: Any) -> None:
    with pytest.raises(ExactnessLostError) as raised:
        make_trainer("GRPO", model, engine=True, **changes)
    compat.refused("TRL", ", ".join(f"{k}={v}" for k, v in changes.items()), raised.value, message)


def test_an_optimizer_of_the_users_own_is_refused(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would step bf16 weights without masters, as other values of `optim` would."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    sgd = torch.optim.SGD(policy.parameters(), lr=0.1)
    own: list[dict[str, Any]] = [{"optimizers": (sgd, None)}, {"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}]
    for given in own:
        with pytest.raises(ExactnessLostError, match=r"optimizer SGD .* without fp32 masters"):
            make_trainer("SFT", policy, trainer=given)
    make_trainer("SFT", policy, trainer=own[0], rl_kernel_strict=False)
    assert "optimizer SGD" in caplog.text


def test_models_in_fp16_are_refused(model: Path) -> None:
    """Loaded by name, given as a module, and with fp32 throughout."""
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (model, {"model_init_kwargs": {"dtype": "float16"}}),
        (half, {}),
        (half, {"bf16": False}),
    ]
    for policy, changes in cases:
        with pytest.raises(ExactnessLostError, match=r"embed_tokens.weight is torch.float16; expected torch.\w*"):
            make_trainer("SFT", policy, rl_kernel_strict=False, **changes)


def test_the_certificate_says_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    """With top-p and without the engine's sets TRL's forward stays, and the log says so."""
    from rlkernel_trl.exactness import Certificate, Verdict

    for rebuilds, words in (
        (False, "skipped from now on, except every 50"),
        (True, "because it recomputes the sets"),
    ):
        caplog.clear()
        certificate = Certificate(1, 50, True)
        certificate.rebuilds = rebuilds
        certificate.update(Verdict(8, 0, 0.0, 0.0), 3)
        assert "certified at step 3: 8 sampled tokens" in caplog.text and words in caplog.text


@pytest.mark.parametrize("bf16", [None, True, False])
def test_a_copied_configuration_keeps_its_dtype(bf16: bool | None) -> None:
    """`bf16` is False under the flag, so a copy made field by field needs another field."""
    import dataclasses

    from rlkernel_trl import SFTConfig
    from rlkernel_trl.config import weight_dtype

    args = SFTConfig(**settings("SFT", True, bf16=bf16))
    wanted = torch.float32 if bf16 is False else torch.bfloat16
    again = SFTConfig(**args.to_dict())
    for copied in (args, dataclasses.replace(args, learning_rate=1e-5), again, dataclasses.replace(again, seed=3)):
        assert weight_dtype(copied) == wanted and copied.bf16 is False
    off = dataclasses.replace(args, use_rl_kernel_backend=False)
    assert off.bf16 is SFTConfig(**settings("SFT", False, bf16=bf16)).bf16 and off.rl_kernel_dtype is None
    assert weight_dtype(dataclasses.replace(args, bf16=True)) == torch.bfloat16
    assert weight_dtype(dataclasses.replace(args, rl_kernel_dtype="float32")) == torch.float32
    with pytest.raises(ValueError, match="rl_kernel_dtype is 'float16'"):
        dataclasses.replace(args, rl_kernel_dtype="float16")


def test_patch(model: Path) -> None:
    import trl
    import trl.trainer.sft_trainer

    stock = trl.GRPOTrainer, trl.trainer.sft_trainer.SFTTrainer
    rlkernel_trl.patch()
    rlkernel_trl.patch()
    try:
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer import RLOOTrainer
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.sft_trainer import SFTTrainer

        assert (RLOOTrainer, DPOConfig) == (rlkernel_trl.RLOOTrainer, rlkernel_trl.DPOConfig)
        assert SFTTrainer is rlkernel_trl.SFTTrainer
        make_trainer("SFT", model, package=trl, max_steps=1).train()

        assert GRPOTrainer is rlkernel_trl.GRPOTrainer and GRPOConfig is rlkernel_trl.GRPOConfig
        assert GRPOConfig(**settings("GRPO", False)).use_rl_kernel_backend is False
    finally:
        rlkernel_trl.unpatch()
    assert (trl.GRPOTrainer, trl.trainer.sft_trainer.SFTTrainer) == stock


def _loaded(model: Path, trained: Any) -> Any:
    """A plain model that got the weights of one with adapters, as an engine does."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    plain.load_state_dict(dict(rlkernel_transformers.merged_weights(trained)), strict=False)
    return plain


def test_lora(model: Path, compat: Any) -> None:
    """The training forward uses the merged weights of the rollout; the base does not change."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer("GRPO", model, engine=True, max_steps=4, beta=0.04, trainer={"peft_config": lora})
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    trainer.train()
    assert_exact(history(trainer), 4)
    after = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, after[n]) for n, p in base.items())
    assert any(bool(p.any()) for n, p in after.items() if "lora_B" in n)
    # The page's line for fingerprints: the engine's weights are the merged ones, under the names of the model.
    merged = rlkernel_vllm.fingerprints(rlkernel_transformers.merged_weights(trainer.model))
    assert rlkernel_vllm.compare(rlkernel_vllm.fingerprints(_loaded(model, trainer.model)), merged) == {}
    assert rlkernel_vllm.compare(rlkernel_vllm.fingerprints(trainer.model), merged)
    compat.exact("TRL", "engine as rollout_func: LoRA, KL")


def test_without_the_kept_sets_the_numbers_differ(model: Path, compat: Any) -> None:
    """The control of the filters: scores over all tokens do not equal the engine's."""
    trainer = make_trainer("GRPO", model, engine=True, top_p=0.8, rl_kernel_strict=False, max_steps=1)
    rollout = trainer.rollout_func

    def forget(prompts: Any, t: Any) -> dict[str, Any]:
        out = rollout(prompts, t)
        backend = t._rl_kernel
        backend.generation(t).kept, backend.filters = None, type(backend.filters)(backend.filters.temperature)
        return out

    trainer.rollout_func = forget
    trainer.train()
    differing = int(history(trainer)[0]["rlkernel/mismatch_tokens"])
    assert differing > 10
    total = round(differing / (1 - history(trainer)[0]["rlkernel/exact_frac"]))
    compat.compared("TRL", "control: top-p without the kept sets", differing, total)


@pytest.mark.parametrize("strict", [True, False])
def test_a_batch_that_only_stock_operators_score(model: Path, strict: bool) -> None:
    trainer = make_trainer("SFT", model, max_steps=1, rl_kernel_strict=strict)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "token_type_ids": torch.zeros(4, 1, dtype=torch.int64)}
    if strict:
        with pytest.raises(ExactnessLostError, match="token_type_ids"):
            trainer.train()
        return
    trainer.train()
    assert history(trainer)[0]["rlkernel/fallbacks"] == 1


WORKER = {"active": True, "exact": True, "contract": "rlk-2", "attention": "split", "tp_leaves": 1, "findings": []}


class _Server:
    """Answers like TRL's client of a `vllm serve` process."""

    base_url = "http://localhost:8000"

    def __init__(self, workers: list[Any] | int | None = None, **changes: Any):
        model = {"model": "m", "dtype": "torch.bfloat16", "logprobs_mode": "processed_logprobs"}
        self.info = {"additional_config": {"use_rl_kernel_backend": True}, "model_config": model}
        for name, value in changes.items():
            (self.info if name in self.info else model)[name] = value
        on = (self.info["additional_config"] or {}).get("use_rl_kernel_backend")
        self.workers = workers if workers is not None else [WORKER] if on else 500
        self.session = self

    def post(self, url: str, json: dict[str, str], timeout: float) -> Any:
        assert url == f"{self.base_url}/collective_rpc" and json == {"method": "rlkernel_status"}
        if isinstance(self.workers, int):
            return SimpleNamespace(status_code=self.workers)
        return SimpleNamespace(status_code=200, json=lambda: {"results": self.workers})

    def get_server_info(self) -> dict[str, Any]:
        return self.info


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"additional_config": {}}, r"without rlkernel's plugin; start it with: VLLM_SERVER_DEV_MODE=1 vllm serve m"),
        ({"additional_config": None}, "without rlkernel's plugin"),
        ({"dtype": "torch.float16"}, "computes in torch.float16, the trainer in bfloat16"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs"),
    ],
    ids=str,
)
def test_what_a_server_is_asked(model: Path, changes: dict[str, Any], message: str | None, compat: Any) -> None:
    from rlkernel_trl.vllm import check_server

    backend = make_trainer("GRPO", model, engine=True)._rl_kernel
    if message is None:
        check_server(backend, _Server(**changes))
        return
    with pytest.raises(ExactnessLostError) as raised:
        check_server(backend, _Server(**changes))
    compat.refused("TRL", f"server with {', '.join(f'{k} {v}' for k, v in changes.items())}", raised.value, message)


def test_what_the_workers_of_a_server_answer(model: Path) -> None:
    """The flag on the command line does not prove that the plugin is active."""
    from rlkernel_trl.vllm import check_server

    backend = make_trainer("GRPO", model, engine=True)._rl_kernel
    inexact = {**WORKER, "exact": False, "findings": [["kv_cache_dtype", "'fp8'"]]}
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"workers": 500},
            r"plugin, although use_rl_kernel_backend is set: .*VLLM_PLUGINS.*start it with: VLLM_SERVER",
        ),
        ({"workers": [WORKER, None]}, "though use_rl"),
        ({"workers": 404}, "/collective_rpc"),
        ({"workers": [{**WORKER, "contract": "rlk-1"}]}, r"under contract rlk-1 .*, the trainer under rlk-2"),
        ({"workers": [{**WORKER, "contract": "rlk-2+fa3", "attention": "fa3"}]}, r"attention fa3"),
        ({"workers": [{**WORKER, "tp_leaves": 8}]}, "with tp_leaves=8, the trainer with rl_kernel_tp_leaves=1"),
        ({"workers": [inexact]}, "not exact with kv_cache_dtype: 'fp8'"),
        ({"additional_config": {"use_rl_kernel_backend": "false"}, "workers": 500}, "plugin; start it"),
    ]
    for changes, message in cases:
        with pytest.raises(ExactnessLostError, match=message):
            check_server(backend, _Server(**changes))
    check_server(backend, _Server(additional_config={}, workers=[WORKER]))  # by RLKERNEL_VLLM=1
