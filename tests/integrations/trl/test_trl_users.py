"""What users of TRL's trainers do besides the page's examples: other trainers, optimizers, overrides, callbacks.

Each either works as without the flag, or is an error that names it; nothing is silently ignored.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from trl_side import history, make_trainer, rows, settings

import rlkernel_transformers
import rlkernel_trl
from rlkernel_trl import ExactnessLostError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), vocab_size=320)


def _stock(model: Path, algorithm: str, args: Any, kind: Any) -> Any:
    from datasets import Dataset

    extra = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if algorithm == "GRPO" else {}
    return kind(model=str(model), args=args, train_dataset=Dataset.from_list(rows(algorithm)), **extra)


def test_a_stock_trainer_with_our_configuration_is_an_error(model: Path) -> None:
    """Also a class derived before `patch()`; without the flag our configuration works like TRL's."""
    import trl

    class Own(trl.GRPOTrainer):
        pass

    for algorithm, kind in (("SFT", trl.SFTTrainer), ("GRPO", Own)):
        args = getattr(rlkernel_trl, f"{algorithm}Config")(**settings(algorithm, True))
        with pytest.raises(ExactnessLostError, match=rf"{kind.__name__} does not read the flag; .*patch\(\)"):
            _stock(model, algorithm, args, kind)
    _stock(model, "SFT", rlkernel_trl.SFTConfig(**settings("SFT", False, max_steps=1)), trl.SFTTrainer).train()


def test_an_optimizer_that_comes_later(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Set on the trainer, or created by an override: refused when training begins, before a step."""

    class Own(rlkernel_trl.SFTTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            return self.optimizer

    def trainer(own: bool, **changes: Any) -> Any:
        from datasets import Dataset

        args = rlkernel_trl.SFTConfig(**settings("SFT", True, max_steps=1, **changes))
        kind = Own if own else rlkernel_trl.SFTTrainer
        made = kind(model=str(model), args=args, train_dataset=Dataset.from_list(rows("SFT")))
        if not own:
            made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        return made

    for own, name in ((False, "SGD"), (True, "AdamW")):
        with pytest.raises(ExactnessLostError, match=f"optimizer is a {name}, set after construction"):
            trainer(own).train()
    trainer(True, rl_kernel_strict=False).train()
    assert "optimizer is a AdamW" in caplog.text


def _score(self: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *a: Any, **k: Any) -> Any:
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    logp = logits.float().log_softmax(-1)
    return logp.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], -(logp.exp() * logp).sum(-1), None


def test_a_step_that_compares_nothing_is_an_error(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class with its own scoring, and a rollout without log-probabilities: strict mode stops."""
    from datasets import Dataset

    class Own(rlkernel_trl.GRPOTrainer):
        _get_per_token_logps_and_entropies = _score

    def trainer(kind: Any, rollout: Any, **changes: Any) -> Any:
        args = rlkernel_trl.GRPOConfig(**settings("GRPO", True, max_steps=2, **changes))
        return kind(
            model=str(model),
            args=args,
            train_dataset=Dataset.from_list(rows("GRPO")),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            rollout_func=rollout,
        )

    def silent(prompts: Any, made: Any) -> dict[str, Any]:
        ids = made._tokenize_prompts(prompts)[0]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7]] * len(ids), "logprobs": None}

    with pytest.raises(ExactnessLostError, match=r"no sampled token was compared .*: Own does not score"):
        trainer(Own, rlkernel_trl.rollout_func()).train()
    with pytest.raises(ExactnessLostError, match=r"compared .*: the rollout returned no log-probabilities"):
        trainer(rlkernel_trl.GRPOTrainer, silent).train()
    caplog.clear()
    trainer(rlkernel_trl.GRPOTrainer, silent, rl_kernel_strict=False).train()
    assert caplog.text.count("returned no log-probabilities") == 1  # once, not at every step

    class Calls(rlkernel_trl.GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    doubled = trainer(Calls, rlkernel_trl.rollout_func())
    doubled.train()
    assert all(row["rlkernel/exact_frac"] == 1 for row in history(doubled))


def test_chunks_of_row_parallel_layers(model: Path) -> None:
    """Trainer and engine compute with the same chunks."""
    trainer = make_trainer("GRPO", model, engine=True, rl_kernel_tp_leaves=4)
    trainer.train()
    assert all(row["rlkernel/exact_frac"] == 1 for row in history(trainer))
    assert trainer.model.model.layers[0].self_attn.o_proj._rlkernel_chunks == 4


def test_masked_completions_compare_nothing_and_that_is_right(model: Path) -> None:
    trainer = make_trainer("GRPO", model, engine=True, mask_truncated_completions=True, max_completion_length=1)
    trainer.train()
    assert len(history(trainer)) == 3


def test_a_refused_trainer_leaves_the_model_as_it_was(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 weights that were rounded and forwards that were replaced are restored, so that the user can try again."""
    from transformers import AutoModelForCausalLM

    from rlkernel_trl import vllm
    from rlkernel_trl.backend import Backend

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = [p.clone() for p in policy.parameters()]

    def refuse(backend: Any, trainer: Any) -> None:
        assert next(policy.parameters()).dtype == torch.bfloat16
        backend.report_inexact("what is known when the trainer is there")

    attach = Backend.attach

    def as_with_vllm(self: Any, trainer: Any) -> None:
        self.settings.use_vllm = True
        attach(self, trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Backend, "attach", as_with_vllm)
        patched.setattr(vllm, "attach", refuse)  # the last check: it asks a server's workers
        with pytest.raises(ExactnessLostError, match="what is known"):
            make_trainer("GRPO", policy, engine=True, beta=0.1)
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    assert "forward" not in policy.__dict__ and rlkernel_transformers.status(policy).contract is None
    trainer = make_trainer("GRPO", policy, engine=True, max_steps=2)
    trainer.train()
    assert all(row["rlkernel/exact_frac"] == 1 for row in history(trainer))
    first = next(p for p in trainer.model.parameters() if p.requires_grad)
    assert trainer.optimizer.state[first]["master"].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp16_full_eval": True}, "fp16_full_eval and bf16_full_eval cast the model"),
        ({"bf16_full_eval": True}, "fp16_full_eval and bf16_full_eval cast the model"),
        (
            {"deepspeed": "zero3.json"},
            r"DeepSpeed \(deepspeed in the configuration\) sums .*; launch with FSDP2 \(fsdp_v",
        ),
    ],
    ids=str,
)
def test_more_refusals(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExactnessLostError, match=message):
        make_trainer("SFT", model, rl_kernel_strict=False, **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_rl_kernel_backend", "no"),
        ("rl_kernel_strict", "false"),
        ("rl_kernel_gradient_tree", None),
        ("rl_kernel_check_steps", 0),
        ("rl_kernel_check_steps", "2"),
        ("rl_kernel_recheck_every", -1),
    ],
)
def test_values_of_another_kind_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected"):
        rlkernel_trl.GRPOConfig(**{**settings("GRPO", True), name: value})


def test_another_trl_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trl.trainer.sft_trainer

    monkeypatch.delattr(trl.trainer.sft_trainer, "add_fused_lm_head")
    with pytest.raises(ExactnessLostError, match=r"TRL 1\.\d.* pip install 'trl>=1.16,<1.17'"):
        make_trainer("SFT", model)


def test_generate_in_a_callback_under_gradient_checkpointing(model: Path) -> None:
    """TRL uses gradient checkpointing by default, and callbacks sample between steps in training mode."""
    from transformers import TrainerCallback

    ids, found = torch.tensor([[5, 6, 7]]), []

    class Sample(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            assert model.training
            for cached in (True, False):
                out = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cached, eos_token_id=None)
                found.append(out.tolist())

    make_trainer("SFT", model, gradient_checkpointing=True, max_steps=1, trainer={"callbacks": [Sample()]}).train()
    assert found[0] == found[1] and len(found[0][0]) == 9


def test_the_log_says_nothing_is_skipped_where_nothing_is(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one update per generation and without vLLM, TRL does not compute old log-probabilities."""
    make_trainer("GRPO", model, engine=True).train()
    assert "TRL does not compute old log-probabilities with these settings" in caplog.text
    assert "skipped from now on" not in caplog.text


def test_an_older_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    import trl

    spec = importlib.util.find_spec("rlkernel_trl.config")
    assert spec is not None and spec.loader is not None
    monkeypatch.setattr(trl, "__version__", "1.9.0.dev0")
    with pytest.raises(ImportError, match=r"supports TRL 1.16, and TRL 1.9.0.dev0 is installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_remove_after_training(model: Path) -> None:
    """The trained model computes as transformers does, also under TRL's wrappers, and a stock trainer takes it."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    trainer = make_trainer("GRPO", model, engine=True, max_steps=1, beta=0.1)
    trainer.train()
    trained, ids = trainer.model, torch.tensor([[5, 6, 7]])
    rlkernel_transformers.remove(trained)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    plain.load_state_dict(trained.state_dict())
    with torch.no_grad():
        assert torch.equal(trained.eval()(ids).logits, plain.eval()(ids).logits)
    assert trained.generate(ids, max_new_tokens=3, eos_token_id=None).shape == (1, 6)
    with pytest.raises(ExactnessLostError, match=r"rlkernel_transformers.remove was called on; call .*apply\(model\)"):
        trainer.train()

    args = settings("SFT", False, max_steps=1, bf16=False)
    args.pop("use_rl_kernel_backend")
    stock = SFTTrainer(model=trained.float(), args=SFTConfig(**args), train_dataset=Dataset.from_list(rows("SFT")))
    stock.train()
    assert "loss" in history(stock)[0]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 40, "min_p": 0.01, "num_iterations": 2},
        {"top_p": 0.5, "beta": 0.1, "importance_sampling_level": "sequence"},
        {"top_p": 0.7, "beta": 0.1, "lora": True},  # the reference, with other adapters, is scored first
        {"top_p": 0.7, "beta": 0.1, "lora": "ref"},
    ],
    ids=str,
)
def test_a_rollout_that_adds_tokens_of_an_environment(model: Path, filters: dict[str, Any]) -> None:
    """A rollout that wraps our engine: its tokens are compared, over recomputed sets; added tokens are not."""
    ours = rlkernel_trl.rollout_func()

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        out = ours(prompts, trainer)
        out["env_mask"] = [[1] * len(ids) + [0, 0] for ids in out["completion_ids"]]
        out["completion_ids"] = [[*ids, 7, 8] for ids in out["completion_ids"]]
        out["logprobs"] = [[*row, 0.0, 0.0] for row in out["logprobs"]]
        return out

    lora, policy, given = filters.pop("lora", False), model, {"rollout_func": rollout}
    if lora:
        import peft
        from transformers import AutoModelForCausalLM

        adapter = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        filters |= {"learning_rate": 3e-2}
        if lora == "ref":  # an adapter that is trained on: TRL keeps a copy of it as the reference
            policy = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter)
        else:
            given["peft_config"] = adapter
    trainer = make_trainer("GRPO", policy, max_steps=3, trainer=given, logging_nan_inf_filter=False, **filters)
    trainer.train()
    assert all(math.isfinite(row[name]) for row in history(trainer) for name in ("loss", "grad_norm"))
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    compared = [row for row in history(trainer) if "rlkernel/exact_frac" in row]
    assert len(compared) >= 2 and all(row["rlkernel/exact_frac"] == 1 for row in compared)
    if lora:
        assert trainer.model.active_adapter == "default" and history(trainer)[-1]["kl"] > 0
        assert all(p.requires_grad == (".default." in n) for n, p in trainer.model.named_parameters() if "lora_" in n)


def test_a_launcher_with_autocast_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ExactnessLostError, match="mixed_precision='bf16' autocast; launch with mixed_precision=no"):
        make_trainer("SFT", "/no/such/model")


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "tensor, context or sequence parallelism"),
    ],
)
def test_a_launcher_that_shards_is_refused(variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the environment has the options of `accelerate launch`."""
    monkeypatch.setenv(variable, "true")
    with pytest.raises(
        ExactnessLostError, match=rf"{name} \({variable}, set by accelerate launch\) .* launch with FSDP2"
    ):
        rlkernel_trl.SFTConfig(**settings("SFT", True))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig", "IA3Config"])
@pytest.mark.parametrize("algorithm", ["SFT", "GRPO"])
def test_other_adapters_than_lora_are_named(model: Path, kind: str, algorithm: str) -> None:
    """Before anything is loaded; also for a model that already has an adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    own = (
        {"target_modules": ["q_proj"], "feedforward_modules": []} if kind == "IA3Config" else {"num_virtual_tokens": 4}
    )
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **own)
    message = f"adapters of {kind} are not supported; .* use peft.LoraConfig"
    with pytest.raises(ExactnessLostError, match=message):
        make_trainer(algorithm, "/no/such/model", rl_kernel_strict=False, trainer={"peft_config": config})
    with pytest.raises(ExactnessLostError, match=message):
        make_trainer(algorithm, peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config))


@pytest.mark.parametrize("algorithm", ["SFT", "DPO"])
def test_noise_on_the_embeddings_is_for_training_without_a_rollout(model: Path, algorithm: str) -> None:
    plain, noisy = (make_trainer(algorithm, model, max_steps=1, **more) for more in ({}, {"neftune_noise_alpha": 5.0}))
    for trainer in (plain, noisy):
        trainer.train()
    losses = [history(trainer)[0]["loss"] for trainer in (plain, noisy)]
    assert losses[0] != losses[1] and all(map(math.isfinite, losses))
    with pytest.raises(ExactnessLostError, match=r"neftune_noise_alpha adds noise .* not in the rollout"):
        make_trainer("GRPO", model, neftune_noise_alpha=5.0)


@pytest.mark.parametrize("algorithm", ["SFT", "DPO"])
def test_lora_dropout_without_a_rollout(model: Path, algorithm: str) -> None:
    """Low-rank products with dropout in training, as in TRL's own trainer; merged in an evaluation.

    Rows are of one length: torch's masks are then those of padded rows, too.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    changes: dict[str, Any] = {"bf16": False, "max_steps": 3, "learning_rate": 1e-2}
    changes |= {"disable_dropout": False} if algorithm == "DPO" else {}
    texts = {"chosen": " red green", "rejected": " green red"} if algorithm == "DPO" else {"completion": " red green"}
    data = Dataset.from_list([{"prompt": "name a colour", **texts}] * 16)
    found, runs = {}, {"stock": (False, 0.25), "ours": (True, 0.25), "none": (True, 0.0)}
    for name, (flag, dropout) in runs.items():
        lora = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"])
        policy = AutoModelForCausalLM.from_pretrained(model)
        trainer = make_trainer(algorithm, policy, flag, trainer={"peft_config": lora, "train_dataset": data}, **changes)
        if flag:
            status = rlkernel_transformers.status(trainer.model)
            assert status.exact and ("separate in training mode, with dropout" in str(status)) == (dropout > 0)
        torch.manual_seed(1)
        trainer.train()
        found[name] = [(row["loss"], row["grad_norm"]) for row in history(trainer)]
        if name == "ours":
            trained = trainer.model.eval()
            ids = torch.tensor([[5, 6, 7, 8]])
            with torch.no_grad():
                dropped = trained(ids).logits
                plain = AutoModelForCausalLM.from_pretrained(model)
                plain.load_state_dict(dict(rlkernel_transformers.merged_weights(trained)), strict=False)
                assert torch.equal(dropped, rlkernel_transformers.apply(plain).eval()(ids).logits)
    close = torch.tensor(found["ours"]), torch.tensor(found["stock"])
    torch.testing.assert_close(*close, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(close[0][1:], torch.tensor(found["none"])[1:], rtol=1e-3)


def test_lora_dropout_with_a_rollout_is_refused(model: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(rlkernel_transformers.UnsupportedModelError, match=r"which a rollout does not have"):
        make_trainer("GRPO", model, trainer={"peft_config": lora})
    trainer = make_trainer("GRPO", model, max_steps=1, disable_dropout=True, trainer={"peft_config": lora})
    trainer.train()
    assert history(trainer)[0]["rlkernel/exact_frac"] == 1


@pytest.mark.parametrize("algorithm", ["SFT", "GRPO"])
def test_status_shows_what_runs(model: Path, algorithm: str) -> None:
    """TRL's call for log-probabilities runs on rlkernel too, until `remove`."""
    trainer = make_trainer(algorithm, model)
    found = rlkernel_transformers.status(trainer.model)
    assert found.exact and found.contract == "rlk-2" and found.rows[0].remark == "log-probabilities for TRL's trainer"
    rlkernel_transformers.remove(trainer.model)
    found = rlkernel_transformers.status(trainer.model)
    assert found.contract is None and found.rows[0].runs == "stock"


def test_another_default_dtype(model: Path) -> None:
    """In scripts that set bf16 as torch's default dtype, sampled log-probabilities stay fp32."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        trainer = make_trainer("GRPO", model, engine=True, max_steps=2)
        trainer.train()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [row["rlkernel/exact_frac"] for row in history(trainer)] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1e-3}, r"temperature=0.001: vLLM raises it to 0.01"),
        (
            {"generation_kwargs": {"logprobs": 3}},
            r"generation_kwargs logprobs: ",
        ),  # of the most likely tokens, as TRL expects
        ({"generation_kwargs": {"n": 2}}, r"generation_kwargs n: "),
        ({"generation_kwargs": {"truncate_prompt_tokens": 2}}, r"generation_kwargs truncate_prompt_tokens: "),
    ],
    ids=str,
)
def test_a_setting_that_vllm_changes_is_named(model: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExactnessLostError, match=message):
        make_trainer("GRPO", model, use_vllm=True, **changes)


def test_weights_that_were_loaded_between_two_runs_are_trained_on(model: Path, tmp_path: Path) -> None:
    """As with `load_best_model_at_end`: masters of the last step are not those of the best one."""
    saving = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path)}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer("SFT", model, learning_rate=0.5, **saving, **best, trainer={"eval_dataset": _eval_rows()})
    trainer.train()
    assert trainer.state.best_global_step < trainer.state.global_step
    loaded = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.args.learning_rate = 0.0
    for group in trainer.optimizer.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.0
    trainer.train()
    assert all(torch.equal(p, loaded[name]) for name, p in trainer.model.named_parameters())


def _eval_rows() -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows("SFT")[:4])
