"""The forward itself: initialisation, dtype moves, recomputation, main_grad, compilation, log-probabilities."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.models import Decoder, ModelConfig, PackedBatch, Rope
from rlkernel.models.rope_table import rope_table

CONFIG = ModelConfig("qwen3", 40, 32, 48, 2, 4, 2, 16, max_position_embeddings=64, tie_word_embeddings=True)
ROWS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13], [3, 1, 3, 1, 39]]


def objective(model: Decoder, rows: list[list[int]]) -> torch.Tensor:
    """Sum of next-token log-probabilities; a sum over rows has no division that a split would change."""
    batch = PackedBatch.from_sequences([row[:-1] for row in rows])
    targets = torch.tensor([token for row in rows for token in row[1:]])
    return model.logprob(model(batch), targets).logp.sum()


def test_initialisation() -> None:
    a, b, other = Decoder.from_config(CONFIG), Decoder.from_config(CONFIG), Decoder.from_config(CONFIG, seed=1)
    for (name, x), y, z in zip(a.named_parameters(), b.parameters(), other.parameters(), strict=True):
        assert_bitwise(x, y, name)
        assert x.dim() == 1 or not torch.equal(x, z)
    assert float(a.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert bool((a.norm.weight == 1).all())
    biased = Decoder.from_config(replace(CONFIG, model_type="qwen2"))
    assert biased.layers[0].self_attn.q_norm is None
    assert bool((biased.layers[0].self_attn.qkv_proj.bias == 0).all())
    rounded = Decoder.from_config(replace(CONFIG, dtype=torch.bfloat16))
    assert_bitwise(rounded.embed_tokens.weight, a.embed_tokens.weight.to(torch.bfloat16), "drawn in fp32")


def test_table_keeps_its_bits() -> None:
    """`model.to(bfloat16)` rounds the parameters but never the rope table."""
    model = Decoder.from_config(replace(CONFIG, rope=Rope(10000.0, "llama3", 4.0)))
    table = rope_table(model.config)
    model = model.to(torch.bfloat16)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert_bitwise(model.cos_sin, table, "table after .to(bfloat16)")
    assert "cos_sin" not in model.state_dict()
    assert model(PackedBatch.from_sequences(ROWS)).dtype == torch.bfloat16
    with torch.device("meta"):
        empty = Decoder(CONFIG)
    assert_bitwise(empty.to_empty(device="cpu").cos_sin, rope_table(CONFIG), "table after the meta device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputation_changes_no_bit_and_keeps_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers run twice, attention's forward once; a second backward of the same graph works too."""
    runs: dict[str, int] = {}

    def count(name: str) -> None:
        module = sys.modules[f"rlkernel.ops.{name}"]
        run = getattr(module, f"_{name}")
        monkeypatch.setattr(
            module, f"_{name}", lambda *args: runs.__setitem__(name, runs.get(name, 0) + 1) or run(*args)
        )

    def gradients(recompute: bool) -> dict[str, torch.Tensor]:
        model = Decoder.from_config(replace(CONFIG, dtype=dtype))
        model.gradient_checkpointing = recompute
        model.zero_main_grads()
        runs.clear()
        value = objective(model, ROWS)
        value.backward(retain_graph=True)
        assert runs == {"attention": CONFIG.num_layers, "swiglu": CONFIG.num_layers * (2 if recompute else 1)}
        value.backward()
        assert runs["attention"] == CONFIG.num_layers
        model.fold_main_grads()
        return {name: p.main_grad for name, p in model.named_parameters()}

    count("attention")
    count("swiglu")
    plain, recomputed = gradients(False), gradients(True)
    for name, grad in plain.items():
        assert bool(grad.any()), name
        assert_bitwise(recomputed[name], grad, name)


@pytest.mark.parametrize("tied", [True, False])
def test_micro_batches_change_no_gradient_bit(tied: bool) -> None:
    """Backwards of parts, in packed order, continue the chains that one backward of the whole batch runs."""

    def gradients(parts: list[list[list[int]]]) -> dict[str, torch.Tensor]:
        model = Decoder.from_config(replace(CONFIG, tie_word_embeddings=tied, dtype=torch.bfloat16))
        model.zero_main_grads()
        for part in parts:
            objective(model, part).backward()
        model.fold_main_grads()
        assert all(p.grad is None for p in model.parameters())
        return {name: p.main_grad.clone() for name, p in model.named_parameters()}

    whole = gradients([ROWS])
    for parts in ([ROWS[:1], ROWS[1:]], [ROWS[:3], ROWS[3:]], [[row] for row in ROWS]):
        for name, grad in gradients(parts).items():
            assert_bitwise(grad, whole[name], f"{name} of {len(parts)} micro-batches")


def test_main_grad_equals_grad() -> None:
    """With and without main_grad the same gradient, in fp32: the tied embedding's two parts add up."""
    model = Decoder.from_config(CONFIG)
    objective(model, ROWS).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_main_grads()
    objective(model, ROWS).backward()
    model.fold_main_grads()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.main_grad, plain[name], rtol=1e-6, atol=1e-7, msg=name)
    model.zero_main_grads()
    assert not any(bool(p.main_grad.any()) for p in model.parameters())


def test_logprob_is_that_of_logits() -> None:
    model = Decoder.from_config(replace(CONFIG, dtype=torch.bfloat16))
    hidden = model(PackedBatch.from_sequences(ROWS)).detach()
    targets = torch.arange(hidden.shape[0])
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32 and logits.shape == (hidden.shape[0], CONFIG.vocab_size)
    for temperature in (1.0, 0.7):
        ours, direct = (
            model.logprob(hidden, targets, temperature),
            ops.logprob(logits, targets, temperature=temperature),
        )
        assert_bitwise(ours.logp, direct.logp, "logp")
        assert_bitwise(ours.entropy, direct.entropy, "entropy")
    expected = torch.log_softmax(logits.double(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(model.logprob(hidden, targets).logp.double(), expected, rtol=1e-6, atol=1e-5)


def test_compiles_whole() -> None:
    model = Decoder.from_config(CONFIG)
    batch = PackedBatch.from_sequences(ROWS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(batch), model(batch), "compiled forward")
