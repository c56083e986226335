"""0 differing bits between a model of transformers with `apply` and rlkernel.models: forward, log-probabilities,
gradients, of all families in fp32 and bf16 and under autocast; and the control, transformers as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_side import ROWS, decoder_logprobs, fused_gradients, next_tokens, padded, pair, stock
from models.hf_models import CASES

import rlkernel_transformers as rt
from rlkernel import ops
from rlkernel.contract import assert_bitwise
from rlkernel.engine import LLM, SamplingParams
from rlkernel.models import PackedBatch

DTYPES = [torch.float32, torch.bfloat16]
IDS, MASK = padded(ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_our_decoder(case: str, dtype: torch.dtype, compat: Any) -> None:
    model, decoder = pair(case, dtype)
    ids, mask = padded(ROWS)
    out = rt.token_logprobs(model, ids, mask, temperature=0.7)
    ours = decoder_logprobs(decoder, ROWS, 0.7)
    assert out.logp.shape == ids.shape and out.logp.dtype == torch.float32
    for name in ("logp", "entropy", "lse"):
        assert_bitwise(next_tokens(getattr(out, name), mask), getattr(ours, name), name)
    kind = str(dtype).removeprefix("torch.")
    compat.compared("transformers", f"model {case}, {kind}: log-probabilities", 0, ours.logp.numel())
    for result in (next_tokens(out.logp, mask), ours.logp):
        result.sum().backward(retain_graph=True)
    for result in (next_tokens(out.entropy, mask), ours.entropy):
        (0.1 * result.sum()).backward()
    for name, (theirs, own) in fused_gradients(model, decoder).items():
        assert bool(own.any()), name
        assert_bitwise(theirs, own, name)
        compat.compared("transformers", f"model {case}, {kind}: gradients", 0, own.numel())


@pytest.mark.parametrize("case", ["qwen3", "llama3-rope"])  # a tied and an untied head
def test_ids_outside_the_vocabulary_have_no_probability(case: str) -> None:
    """As logits of minus infinity, which vLLM samples with under verl; gradients reach the other rows only."""
    model, _ = pair(case, torch.bfloat16)
    size = max(int(IDS.max()) + 1, model.config.vocab_size - 37)
    assert size < model.config.vocab_size
    with torch.no_grad():
        logits = model(IDS, attention_mask=MASK).logits[:, :-1]
    logits[..., size:] = float("-inf")
    expected = ops.logprob(logits.flatten(0, 1), IDS[:, 1:].flatten(), temperature=0.7).logp.view(IDS[:, 1:].shape)
    chosen = (MASK[:, 1:] * MASK[:, :-1]).bool()
    grads = {}
    for main in (False, True):
        if main:
            rt.main_grads(model)
        found = rt.token_logprobs(model, IDS, MASK, temperature=0.7, vocabulary=size).logp[:, :-1]
        assert_bitwise(found[chosen], expected[chosen], "logp")
        found.sum().backward()
        head = model.lm_head.weight
        grads[main] = getattr(head, "head_main_grad", head.main_grad) if main else head.grad
        if case != "qwen3":
            assert not bool(grads[main][size:].any()) and bool(grads[main][:size].any())
    if case != "qwen3":
        torch.testing.assert_close(grads[False].float(), grads[True], rtol=0.02, atol=0.02)
    with pytest.raises(rt.CallError, match="vocabulary is 0; expected 1 to"):
        rt.token_logprobs(model, IDS, MASK, vocabulary=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama3-rope", "mistral-window"])
@torch.no_grad()
def test_logits_and_hidden_states(case: str, dtype: torch.dtype) -> None:
    model, decoder = pair(case, dtype)
    ids, mask = padded(ROWS)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    hidden = decoder(PackedBatch.from_sequences(ROWS))
    assert out.logits.dtype == torch.float32
    assert_bitwise(out.logits[mask.bool()], decoder.logits(hidden), "logits")
    assert_bitwise(out.hidden_states[-1][mask.bool()], hidden, "hidden states")
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert not bool(out.hidden_states[-1][~mask.bool()].any())
    last = model(ids, attention_mask=mask, logits_to_keep=1).logits
    assert_bitwise(last[:, 0], out.logits[:, -1], "logits_to_keep")


@torch.no_grad()
def test_close_to_transformers_and_control() -> None:
    """Equal to stock transformers within rounding; and stock bits do depend on the padding."""
    for case in CASES:
        model, plain = pair(case)[0], stock(case)
        ids, mask = padded(ROWS, left=False)
        ours, theirs = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model.eval(), plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=case)


@torch.no_grad()
def test_control_stock_differs(compat: Any) -> None:
    """The control: bits of stock transformers change in a padded batch, and differ from our decoder's."""
    rows = [[(7 * i + 3 * j) % 90 + 3 for j in range(20 + 30 * i)] for i in range(4)]
    alone_differs = ours_differs = numbers = 0
    for case in ("qwen3", "llama"):
        plain, (_, decoder) = stock(case), pair(case)
        plain.config._attn_implementation = "sdpa"
        ids, mask = padded(rows)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        together = plain(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
        alone = torch.cat([plain(torch.tensor([row])).logits[0] for row in rows])
        numbers += together.numel()
        alone_differs += int((together != alone).sum())
        ours_differs += int((together != decoder.logits(decoder(PackedBatch.from_sequences(rows)))).sum())
    assert alone_differs > 0 and ours_differs > 0
    compat.compared("transformers", "control: stock logits, a row alone against in a batch", alone_differs, numbers)


@pytest.mark.parametrize("case", ["qwen3-tied", "mistral-window"])
def test_engine_rollout_equals_training_forward(case: str, compat: Any) -> None:
    """Tokens sampled by our engine and scored by transformers' model have the same bits."""
    model, decoder = pair(case, torch.bfloat16)
    llm = LLM(decoder, max_num_seqs=3, max_num_batched_tokens=16, page_size=4, num_pages=128)
    params = [SamplingParams(temperature=0.8, max_tokens=20, seed=i, ignore_eos=True) for i in range(len(ROWS))]
    outputs = [out.outputs[0] for out in llm.generate(ROWS, params)]
    sequences = [row + list(out.token_ids) for row, out in zip(ROWS, outputs, strict=True)]
    ids, mask = padded(sequences)
    labels = ids.masked_fill(mask == 0, -100)
    for i, row in enumerate(sequences):
        labels[i, ids.shape[1] - len(row) :][: len(ROWS[i])] = -100
    with torch.no_grad():
        scored = rt.token_logprobs(model, ids, mask, labels=labels, temperature=0.8).logp
    wanted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
    sampled = torch.cat([out.logprobs_tensor for out in outputs])
    compat.bitwise("transformers", "tokens sampled by rlkernel's engine", scored[wanted], sampled)


@pytest.mark.parametrize("how", ["plain", "checkpointing", "compiled", "main_grads"])
@pytest.mark.parametrize("case", ["qwen2", "qwen3-tied"])
def test_autocast(case: str, how: str, compat: Any) -> None:
    """fp32 weights under autocast(bf16): log-probabilities and gradients of the model cast to bf16, to the bit."""
    (model, _), (half, _) = pair(case), pair(case)
    half = rt.apply(half.to(torch.bfloat16))
    name = "grad"
    called = model
    if how == "compiled":
        for m in (model, half):
            m.model.layers = m.model.layers[:1]
            m.config.num_hidden_layers = 1
        torch._dynamo.reset()
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
    elif how == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case == "qwen2"})
    elif how == "main_grads":
        name = "main_grad"
        rt.main_grads(model)
        rt.main_grads(half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rt.token_logprobs(called, IDS, MASK)
        found.logp.sum().backward()
    expected = rt.token_logprobs(half, IDS, MASK)
    expected.logp.sum().backward()
    for m in (model, half) if how == "main_grads" else ():
        rt.fold_main_grads(m)
    suffix = "" if how == "plain" else f", {how}"
    compat.bitwise("transformers", f"autocast(bf16) over fp32 weights{suffix}", found.logp, expected.logp)
    for (key, p), q in zip(model.named_parameters(), half.parameters(), strict=True):
        own, wanted = getattr(p, name), getattr(q, name)
        assert own.dtype == torch.float32, key
        if how == "main_grads":
            assert_bitwise(own, wanted, key)
        elif p is model.lm_head.weight and case == "qwen3-tied":  # accumulated in fp32 here, in bf16 there
            torch.testing.assert_close(own, wanted.float(), rtol=2e-2, atol=2e-2)
        else:
            assert_bitwise(own.to(torch.bfloat16), wanted, key)


@torch.no_grad()
def test_autocast_in_generation() -> None:
    """Logits and the cache are those of the bf16 model."""
    model, half = pair("qwen3")[0].eval(), pair("qwen3", torch.bfloat16)[0].eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"attention_mask": MASK, "output_logits": True, "return_dict_in_generate": True}
    expected = half.generate(IDS, **options)
    for m in (model, half):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = m.generate(IDS, **options)
        assert_bitwise(torch.stack(found.logits), torch.stack(expected.logits), "logits of generate under autocast")
        assert found.past_key_values.layers[0].keys.dtype == torch.bfloat16


def test_checkpoint_of_the_base_model(tmp_path: Path) -> None:
    """`architectures` may name a base or reward model, because the class that loads it decides."""
    plain = stock("qwen3")
    plain.model.save_pretrained(tmp_path)
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["Qwen3Model"]
    assert rt.status(rt.apply(loaded)).exact
    expected = rt.apply(plain).model(IDS, attention_mask=MASK).last_hidden_state
    assert_bitwise(loaded.model(IDS, attention_mask=MASK).last_hidden_state, expected, "hidden states")
