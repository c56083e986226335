"""The ways a model is called: packing, padding, loss, generation, scoring; and the calls that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_model import make_model
from hf_side import ROWS, decoder_logprobs, next_tokens, padded, pair, stock
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import first_lines

import rlkernel_transformers as rt
from rlkernel import ops
from rlkernel.contract import assert_bitwise

IDS, MASK = padded(ROWS)
FLAT = torch.tensor([[token for row in ROWS for token in row]])
CU = torch.tensor([0, *(len(row) for row in ROWS)]).cumsum(0).to(torch.int32)
PLACES = torch.cat([torch.arange(len(row)) for row in ROWS])[None]
FIRST = (PLACES == 0) | (PLACES == 1)


def reference(case: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return decoder_logprobs(pair(case, dtype)[1], ROWS).logp.detach()


def test_the_lines_of_the_page(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(first_lines("transformers", make_model(tmp_path)), names)
    scored, mask = names["scored"], names["batch"].attention_mask
    assert scored.logp.shape == mask.shape and bool((next_tokens(scored.logp, mask) < 0).all())
    assert rt.status(names["model"]).exact


@torch.no_grad()
def test_packed_callers(compat: Any) -> None:
    """Restarting positions, cu_seq_lens and given rows: the bits of the padded call."""
    model, _ = pair("qwen2", torch.bfloat16)
    labels = FLAT.masked_fill(PLACES == 0, -100)
    inner = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
    expected = reference("qwen2", torch.bfloat16)
    borders = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 17, "max_length_k": 17}
    rows = inner.flatten().nonzero()[:, 0]
    for inputs in ({"position_ids": PLACES}, borders, {**borders, "rows": rows}):
        out = rt.token_logprobs(model, FLAT, labels=labels, **inputs)
        compat.bitwise("transformers", "packed rows", out.logp[inner], expected)
        assert not bool(out.logp[~inner].any())
    assert_bitwise(model(FLAT, position_ids=PLACES).logits, model(FLAT, **borders).logits, "logits of packed rows")


@given(st.data())
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_invariance(data: Any) -> None:
    """Which rows share a batch, on which side and how far they are padded, changes no bit."""
    model, _ = pair("qwen3", data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    order = data.draw(st.permutations(range(len(ROWS))))
    size = data.draw(st.integers(1, len(ROWS)))
    alone = {}
    for i in order[:size]:
        ids = torch.tensor([ROWS[i]])
        alone[i] = rt.token_logprobs(model, ids).logp[0, :-1]
    ids, mask = padded([ROWS[i] for i in order[:size]], data.draw(st.booleans()), data.draw(st.integers(0, 9)))
    out = rt.token_logprobs(model, ids, mask)
    assert_bitwise(next_tokens(out.logp, mask), torch.cat([alone[i] for i in order[:size]]), f"rows {order[:size]}")


@torch.no_grad()
def test_padding_on_both_sides_and_empty_rows(compat: Any) -> None:
    model, _ = pair("llama")
    expected = rt.token_logprobs(model, IDS, MASK).logp
    wide_ids, wide_mask = (torch.nn.functional.pad(t, (0, 6)) for t in (IDS, MASK))
    out = rt.token_logprobs(model, wide_ids, wide_mask)
    compat.bitwise("transformers", "padding on either side", out.logp[:, :-6], expected)
    assert not bool(out.logp[:, -6:].any())
    mask = MASK.clone()
    mask[1] = 0
    out = rt.token_logprobs(model, IDS, mask)
    assert_bitwise(out.logp[[0, 2, 3]], expected[[0, 2, 3]], "beside an empty row")
    assert not bool(out.logp[1].any())
    compat.exact("transformers", "rows of padding alone")


def test_nothing_scored_is_a_zero_with_gradient() -> None:
    model, _ = pair("llama")
    out = rt.token_logprobs(model, IDS, MASK, labels=torch.full_like(IDS, -100))
    assert not bool(out.logp.any())
    out.logp.sum().backward()
    assert not bool(model.lm_head.weight.grad.any())


@torch.no_grad()
def test_scoring_options(compat: Any) -> None:
    """Temperatures by row, kept sets, statistics and keep_probs, beside the logits of the same model."""
    model, _ = pair("qwen3", torch.bfloat16)
    heat = torch.tensor([0.5, 1.0, 2.0, 0.7])
    logits = model(IDS, attention_mask=MASK).logits
    targets = torch.where(MASK.bool(), torch.roll(IDS, 1, 1), -100)
    wanted = targets != -100
    kept = torch.zeros(*IDS.shape, 96, dtype=torch.bool)
    kept[..., :60] = True
    masks = ops.pack_kept(kept.flatten(0, 1)).view(*IDS.shape, -1)
    for options in ({}, {"kept": masks}, {"kept": masks[wanted]}, {"temperature": heat}, {"keep_probs": True}):
        out = rt.token_logprobs(model, IDS, MASK, targets=targets, **options)
        direct = ops.logprob(
            logits[wanted],
            targets[wanted],
            temperature=heat[:, None].expand(IDS.shape)[wanted].contiguous() if "temperature" in options else 1.0,
            kept=masks[wanted] if "kept" in options else None,
        )
        for name in ("logp", "entropy", "lse"):
            feature = f"token_logprobs with {', '.join(options) or 'no option'}"
            compat.bitwise("transformers", feature, getattr(out, name)[wanted], getattr(direct, name))
    out = rt.token_logprobs(model, IDS, MASK, targets=targets, temperature=heat, statistics=True)
    scaled = logits / heat[:, None, None]
    torch.testing.assert_close(out.mean_logit[wanted], scaled.mean(-1)[wanted], rtol=1e-4, atol=1e-4)
    best = torch.where(wanted, logits.argmax(-1), -100)
    assert torch.equal(out.top1[wanted], (best == targets)[wanted])
    assert bool(rt.token_logprobs(model, IDS, MASK, targets=best, statistics=True).top1[wanted].all())


@pytest.mark.parametrize("case", ["qwen3-tied", "llama"])
def test_loss_with_labels(case: str, compat: Any) -> None:
    """SFT and DPO callers: the loss of transformers within rounding, without logits in training."""
    ids, mask = padded(ROWS, left=False)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :4] = -100
    (model, _), plain = pair(case), stock(case)
    for options in ({}, {"num_items_in_batch": 7}):
        ours = model(ids, attention_mask=mask, labels=labels, **options)
        theirs = plain(ids, attention_mask=mask, labels=labels, **options)
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
        assert ours.logits is None
    theirs.loss.backward()
    ours.loss.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=2e-5, msg=name)
    kept = model(ids, attention_mask=mask, labels=labels, skip_logits=False)
    assert kept.logits.shape == (*ids.shape, 96)
    evaluated = model.eval()(ids, attention_mask=mask, labels=labels)
    assert evaluated.logits is not None
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert_bitwise(model(ids, attention_mask=mask, shift_labels=shifted).loss, evaluated.loss, "shift_labels")
    assert isinstance(model(ids, return_dict=False), tuple)
    compat.close("transformers", "loss and gradients of labels against stock, float32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_generate_equals_training_forward(dtype: torch.dtype, compat: Any) -> None:
    """Log-probabilities of `generate`, with and without its cache, have the bits of the training forward."""
    model, _ = pair("qwen3", dtype)
    model.eval()
    prompts, mask = padded(ROWS)
    options: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, "output_logits": True}
    torch.manual_seed(0)
    out = model.generate(prompts, attention_mask=mask, do_sample=True, return_dict_in_generate=True, **options)
    new = out.sequences[:, prompts.shape[1] :]
    rolled = ops.logprob(torch.stack(out.logits, 1).flatten(0, 1), new.flatten()).logp
    whole = torch.cat((mask, torch.ones_like(new)), 1)
    scored = rt.token_logprobs(model, out.sequences, whole).logp[:, prompts.shape[1] - 1 : -1]
    compat.bitwise("transformers", "generate, default cache", rolled, scored.flatten())
    torch.manual_seed(0)
    again = model.generate(prompts, attention_mask=mask, do_sample=True, use_cache=False, **options)
    assert torch.equal(again, out.sequences)


@torch.no_grad()
def test_cache_is_used_only_when_asked_for() -> None:
    model, _ = pair("llama")
    assert model.config.use_cache and model(IDS, attention_mask=MASK).past_key_values is None
    model.eval()
    first = model(IDS[:, :8], attention_mask=MASK[:, :8], use_cache=True)
    rest = model(IDS[:, 8:], attention_mask=MASK, past_key_values=first.past_key_values)
    assert rest.past_key_values.get_seq_length() == IDS.shape[1]
    whole = model(IDS, attention_mask=MASK).logits
    assert_bitwise(rest.logits[MASK[:, 8:].bool()], whole[:, 8:][MASK[:, 8:].bool()], "a chunk after a cache")


def test_refused_calls(compat: Any) -> None:
    model, _ = pair("mistral-window")
    bias = torch.zeros(len(ROWS), 1, IDS.shape[1], IDS.shape[1])
    refused: list[tuple[str, dict[str, Any]]] = [
        ("padding mask", {"attention_mask": bias}),
        ("output_attentions", {"output_attentions": True}),
        ("max_length_q", {"cu_seq_lens_q": CU}),
        ("pack the sequences into one row", {"cu_seq_lens_q": CU, "max_length_q": 17}),
        ("expected", {"attention_mask": MASK[:, 1:]}),
        ("position_ids", {"position_ids": PLACES}),
        ("StaticCache", {"past_key_values": type("StaticCache", (), {"get_seq_length": lambda self: 0})()}),
        ("continuous batching", {"cache": object()}),
    ]
    for text, inputs in refused:
        with pytest.raises(rt.CallError) as raised:
            model(IDS, **inputs)
        compat.refused("transformers", f"call with {', '.join(inputs)}", raised.value, text)
    with pytest.raises(rt.CallError, match="exactly one"):
        model()
    with pytest.raises(rt.CallError, match="max_position_embeddings"):
        model(torch.zeros(1, 129, dtype=torch.int64))
    with pytest.raises(rt.CallError, match="bf16=False"), torch.autocast("cpu", dtype=torch.bfloat16):
        model(IDS)
    with pytest.raises(rt.CallError, match="window"), torch.no_grad():
        model.eval().generate(IDS, attention_mask=MASK, max_new_tokens=3, pad_token_id=0)
    for flag in ("keep_probs", "statistics"):
        with pytest.raises(TypeError, match=f"token_logprobs: {flag}='no' must be True or False"):
            rt.token_logprobs(model, IDS, MASK, **{flag: "no"})
    with pytest.raises(rt.CallError, match="labels and targets"):
        rt.token_logprobs(model, IDS, labels=IDS, targets=IDS)
    with pytest.raises(rt.CallError, match="float32"):
        rt.token_logprobs(model, IDS, temperature=torch.ones(4, dtype=torch.bfloat16))


@torch.no_grad()
def test_targets_that_do_not_fit_the_input_are_named() -> None:
    """Another shape must not score flattened targets against the wrong rows."""
    model, _ = pair("llama")
    ids = torch.arange(20).view(2, 10) + 5
    for wrong in (ids[:, :5], ids[:1], ids[0], torch.cat((ids, ids)), ids.float(), ids.tolist()):
        for name in ("targets", "labels"):
            with pytest.raises(rt.CallError, match=rf"{name} is .*expected .*\[B=2, L=10\] int64"):
                rt.token_logprobs(model, ids, **{name: wrong})
        for name in ("labels", "shift_labels"):
            with pytest.raises(rt.CallError, match=rf"{name} is .*expected .*\[B=2, L=10\] int64"):
                model(ids, **{name: wrong})
    for rows, text in (([3, 20], "holds 20"), ([3, -1], "holds -1"), ([[3]], r"\(1, 1\)"), ([1.0], "float32")):
        with pytest.raises(rt.CallError, match=f"rows .*{text}"):
            rt.token_logprobs(model, ids, targets=ids, rows=torch.tensor(rows))


@torch.no_grad()
def test_bad_input_is_named() -> None:
    """Each argument that does not fit is an error of ours before a kernel sees it."""
    model, _ = pair("llama")
    ids = torch.arange(20).view(2, 10) + 5
    ones, zeros = torch.ones_like(ids), torch.zeros_like(ids)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("unknown argument temprature", {"temprature": 0.5}),
        (r"attention_mask is \(2, 9\)", {"attention_mask": ones[:, 1:]}),
        (r"attention_mask is \(2, 1, 10, 10\)", {"attention_mask": torch.ones(2, 1, 10, 10)}),
        (r"attention_mask is torch.float32, which may be a bias", {"attention_mask": zeros.float()}),
        ("attention_mask is zero everywhere", {"attention_mask": zeros}),
        (r"input_ids is \(20,\); expected \[B, L\]", {"input_ids": ids.flatten()}),
        (r"the input is \[0, 10\]", {"input_ids": ids[:0]}),
        ("temperature is '1'; expected a number", {"temperature": "1"}),
        ("input_ids is a list; expected a tensor", {"input_ids": ids.tolist()}),
        (r"temperature is \(3,\)", {"temperature": torch.ones(3)}),
        (r"temperature is \(3, 10\)", {"temperature": torch.ones(3, 10)}),
        (r"kept is \(2, 5, 3\)", {"kept": torch.zeros(2, 5, 3, dtype=torch.int32)}),
        ("sequences of up to 300 tokens", {"input_ids": ids[:, :1].expand(2, 300)}),
    ]
    for text, inputs in cases:
        with pytest.raises(rt.CallError, match=text):
            rt.token_logprobs(model, **{"input_ids": ids, **inputs})
    with pytest.raises(ValueError, match=r"ids is torch.int32; .* ids.long\(\)"):
        rt.token_logprobs(model, ids.int())
    wide, mask = (torch.nn.functional.pad(t, (300, 0)) for t in (ids, ones))  # wider than the model's positions
    found = rt.token_logprobs(model, wide, mask).logp[:, 300:]
    assert_bitwise(found, rt.token_logprobs(model, ids).logp, "rows shorter than their padding")


def test_apply_names_what_it_does_not_take() -> None:
    for leaves in (0, -1, 3, "2", True):
        with pytest.raises(rt.UnsupportedModelError, match="tp_leaves is"):
            rt.apply(stock("llama"), tp_leaves=leaves)  # type: ignore[arg-type]
    with pytest.raises(rt.UnsupportedModelError, match=r"the model is a str; pass a loaded one"):
        rt.apply("Qwen/Qwen3-0.6B")  # type: ignore[arg-type]
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(rt.UnsupportedModelError, match=r"PrefixTuningConfig: .* use LoRA"):
        rt.apply(peft.get_peft_model(stock("llama"), prefix))
    plain = stock("llama")
    mlp = plain.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.GELU())
    with pytest.raises(rt.UnsupportedModelError, match=r"layer 1 has a torch\.nn\..*Sequential as mlp.up_proj"):
        rt.apply(plain)
    assert not any("_rlkernel_chunks" in module.__dict__ for module in plain.modules())


@torch.no_grad()
def test_attention_interface_alone() -> None:
    """`attn_implementation="rlkernel"` on stock layers: close to theirs, and refused with a cache."""
    plain = stock("qwen2-window")
    positions = (MASK.cumsum(1) - 1).clamp_min(0)
    expected = plain(IDS, attention_mask=MASK, position_ids=positions).logits
    plain.set_attn_implementation("rlkernel")
    found = plain(IDS, attention_mask=MASK, position_ids=positions).logits
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()], rtol=1e-4, atol=1e-4)
    with pytest.raises(rt.CallError, match="apply"):
        plain.generate(IDS, attention_mask=MASK, max_new_tokens=2, pad_token_id=0)
