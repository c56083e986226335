"""Calls of a model: packing, padding, loss, generation, scoring, and refused calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
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


@torch.no_grad()
def reference_padded(case: str) -> torch.Tensor:
    return rt.token_logprobs(pair(case)[0], IDS, MASK).logp


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
    """No bit depends on the rows that share a batch, or on the side and amount of padding."""
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
    """Temperatures by row, kept sets, statistics and keep_probs, against the logits of the same model."""
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
    """Calls of SFT and DPO: the loss of transformers within rounding, without logits in training."""
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
    assert isinstance(model.model(ids, return_dict=False), tuple)
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


GENERATE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "feature", "options"),
    [
        ("qwen3", "generate, static cache", {"cache_implementation": "static"}),
        ("mistral-window", "generate, default cache of sliding windows", {}),
        ("llama", "generate, beams", {"num_beams": 2}),
    ],
)
def test_generate_with_other_caches(case: str, feature: str, options: dict[str, Any], compat: Any) -> None:
    """The same logits as without a cache, to the bit; prompts are longer than the window."""
    model = pair(case)[0].eval()
    common = {**GENERATE, "attention_mask": MASK, "output_logits": True, "return_dict_in_generate": True}
    beams = {"num_beams": options.get("num_beams", 1)}
    found, expected = (model.generate(IDS, **common, **kind) for kind in (options, {"use_cache": False, **beams}))
    assert torch.equal(found.sequences, expected.sequences)
    compat.bitwise("transformers", feature, torch.stack(found.logits), torch.stack(expected.logits))


@torch.no_grad()
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_cache_is_filled_as_in_transformers(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of training the configuration decides, and the next call continues the cache, compiled too."""
    model, _ = pair("llama")
    model.model.layers = model.model.layers[:1]  # compiling takes a second a layer
    model.config.num_hidden_layers = 1
    assert model.config.use_cache and model(IDS, attention_mask=MASK).past_key_values is None
    model.eval()
    torch._dynamo.reset()
    called = model if how == "eager" else torch.compile(model, backend="eager")
    whole = model(IDS, attention_mask=MASK, use_cache=False)
    assert whole.past_key_values is None
    cases: list[dict[str, Any]] = [{"past_key_values": transformers.DynamicCache()}, {}, {"labels": IDS[:, :8]}]
    for inputs in cases if how == "eager" else cases[:2]:
        first = called(input_ids=IDS[:, :8], attention_mask=MASK[:, :8], **inputs)
        rest = called(input_ids=IDS[:, 8:], attention_mask=MASK, past_key_values=first.past_key_values)
        assert rest.past_key_values.get_seq_length() == IDS.shape[1]
        own = MASK[:, 8:].bool()
        assert_bitwise(rest.logits[own], whole.logits[:, 8:][own], f"a chunk after a cache, {how}")
    assert model(FLAT, position_ids=PLACES).past_key_values is None  # packed rows
    monkeypatch.setattr("rlkernel_transformers.calls.new_cache", lambda: pytest.fail("scoring built a cache"))
    rt.token_logprobs(model, IDS, MASK)


@torch.no_grad()
def test_caches_that_cannot_be_filled_are_refused() -> None:
    model = pair("mistral-window")[0].eval()
    model.config.use_cache = False
    for cache, text in (
        (transformers.StaticCache(config=model.config, max_cache_len=40), "StaticCache that drops keys"),
        (
            transformers.StaticCache(config=stock("llama").config, max_cache_len=8),
            "StaticCache of 8 tokens, and",
        ),
    ):
        with pytest.raises(rt.CallError, match=text):
            model(IDS, past_key_values=cache)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"past_key_values: the number of .* compile without fullgraph"):
        compiled(input_ids=IDS, past_key_values=transformers.DynamicCache())
    model.train().gradient_checkpointing_enable()
    with torch.enable_grad(), pytest.raises(rt.CallError, match=r"past_key_values .*gradient_checkpointing_disable"):
        model(IDS, past_key_values=transformers.DynamicCache())


@torch.no_grad()
def test_generate_batch(compat: Any) -> None:
    """transformers' continuous batching with prompts of several lengths returns the tokens of `generate`."""
    model = pair("qwen3")[0].eval()
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    found = model.generate_batch(ROWS, generation_config=config)
    assert model.config._attn_implementation == "rlkernel"
    for row, output in zip(ROWS, found.values(), strict=True):
        expected = model.generate(torch.tensor([row]), **GENERATE)[0, len(row) :]
        assert list(output.generated_tokens) == expected.tolist(), output.error
    compat.exact("transformers", "generate_batch: continuous batching")
    window = pair("mistral-window")[0].eval()
    for output in window.generate_batch(ROWS, generation_config=config).values():
        assert "drops keys outside of sliding windows" in str(output.error)
    with pytest.raises(rt.CallError, match="max_blocks_per_request=0"):
        model(FLAT, position_ids=PLACES, cache=object(), block_table=CU)


@pytest.mark.parametrize("case", ["qwen3", "qwen2-window"])
def test_attention_weights(case: str, compat: Any) -> None:
    """Attention weights equal stock transformers' within rounding, also with a cache and packed rows."""
    model, plain = pair(case)[0].eval(), stock(case)
    ids, mask = padded(ROWS, left=False)
    with pytest.warns(UserWarning, match="eager torch computes them again"):
        ours = model(ids, attention_mask=mask, output_attentions=True)
    theirs = plain(ids, attention_mask=mask, output_attentions=True)
    own = mask[:, None, :, None].bool()
    for found, expected in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(found, expected * own, rtol=1e-4, atol=1e-5)
    compat.close("transformers", "output_attentions, by an eager path of their own")
    logits = model(ids, attention_mask=mask).logits
    compat.bitwise("transformers", "logits with output_attentions", ours.logits, logits)
    with torch.no_grad(), pytest.warns(UserWarning):
        first = model(ids[:, :3], attention_mask=mask[:, :3])
        rest = model(ids[:, 3:], attention_mask=mask, past_key_values=first.past_key_values, output_attentions=True)
        packed = model(FLAT, position_ids=PLACES, output_attentions=True)
    for layer, whole in enumerate(ours.attentions):
        torch.testing.assert_close(rest.attentions[layer], whole[:, :, 3:], rtol=1e-4, atol=1e-5)
        for i, row in enumerate(ROWS):
            at = slice(int(CU[i]), int(CU[i + 1]))
            block = packed.attentions[layer][0, :, at]
            torch.testing.assert_close(block[..., at], whole[i, :, : len(row), : len(row)], rtol=1e-4, atol=1e-5)
            assert torch.allclose(block[..., at].sum(-1), torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_are_in_the_graph(dtype: torch.dtype, compat: Any) -> None:
    """Gradients reach them, equal to stock within rounding; gradients of the weights keep their bits."""
    ids, mask = padded(ROWS, left=False)
    gradients, states = [], []
    for model, options in ((pair("qwen3", dtype)[0], {"output_hidden_states": True}), (pair("qwen3", dtype)[0], {})):
        out = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **options)
        for state in out.hidden_states or ():
            state.retain_grad()
        out.loss.backward()
        states += [state.grad for state in out.hidden_states or ()]
        gradients.append([p.grad for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        compat.bitwise("transformers", "gradients with output_hidden_states", found, expected)
    plain = stock("qwen3", torch.float32)
    out = plain(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), output_hidden_states=True)
    for state in out.hidden_states:
        state.retain_grad()
    out.loss.backward()
    for found, state in zip(states, out.hidden_states, strict=True):
        error = float((found.float() - state.grad).norm() / state.grad.norm())
        assert error < (1e-4 if dtype == torch.float32 else 0.1), error


@torch.no_grad()
def test_hidden_states_of_chosen_layers() -> None:
    model, plain = pair("llama")[0].eval(), stock("llama")
    every = model(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states
    for layers in ([0], (1, 2), {2}):
        found = model(IDS, attention_mask=MASK, output_hidden_states=layers).hidden_states
        theirs = plain(IDS, output_hidden_states=layers).hidden_states
        assert [s is None for s in found] == [s is None for s in theirs]
        for i in layers:
            assert_bitwise(found[i], every[i + 1], f"what layer {i} returns")
    assert model(IDS, output_hidden_states=[]).hidden_states is None


def test_noise_on_the_embeddings() -> None:
    """NEFTune of transformers' Trainer, a hook on [B, L, C]; noise on padding changes nothing."""
    from transformers.integrations.neftune import activate_neftune, neftune_post_forward_hook

    model, _ = pair("llama")
    embedding = model.model.embed_tokens
    plain = embedding(IDS)
    activate_neftune(model, 5.0)
    torch.manual_seed(4)
    noisy = neftune_post_forward_hook(embedding, (), plain)
    torch.manual_seed(4)
    found = rt.token_logprobs(model, IDS, MASK)
    expected = rt.token_logprobs(model, attention_mask=MASK, labels=IDS * MASK - 100 * (1 - MASK), inputs_embeds=noisy)
    assert_bitwise(found.logp, expected.logp, "with noise")
    found.logp.sum().backward()
    assert embedding.weight.grad is not None
    assert_bitwise(rt.token_logprobs(model.eval(), IDS, MASK).logp, reference_padded("llama"), "without, in evaluation")


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("before", [True, False])
def test_learned_prompts(kind: str, before: bool, compat: Any) -> None:
    """PEFT's prompts and prefixes, added before or after `apply`: close to stock, and padding changes nothing."""
    peft = pytest.importorskip("peft")
    options = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}

    def prompted(model: Any) -> Any:
        torch.manual_seed(3)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **options)
        return peft.get_peft_model(model, config).eval()

    plain = prompted(stock("llama"))
    model = rt.apply(prompted(stock("llama"))) if before else prompted(rt.apply(stock("llama")))
    ids, mask = padded(ROWS, left=False)
    labels = ids.masked_fill(mask == 0, -100)
    ours, theirs = (m(input_ids=ids, attention_mask=mask, labels=labels) for m in (model, plain))
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    for out in (ours, theirs):
        out.loss.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=2e-5)
    compat.close("transformers", f"PEFT {kind.removesuffix('Config')}: loss and gradients against stock, float32")
    with torch.no_grad():
        generated = model.generate(input_ids=IDS, attention_mask=MASK, **GENERATE)
        for i, row in enumerate(ROWS):
            alone = model.generate(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row)), **GENERATE)
            assert torch.equal(generated[i, IDS.shape[1] :], alone[0, len(row) :])
    if kind == "PrefixTuningConfig":
        assert rt.token_logprobs(model, IDS, MASK).logp.shape == IDS.shape
    else:
        with pytest.raises(rt.CallError, match="computes 21 tokens per row and 17 have targets, because PEFT"):
            rt.token_logprobs(model, IDS, MASK)
        with model.disable_adapter():
            assert_bitwise(rt.token_logprobs(model, IDS, MASK).logp, reference_padded("llama"), "without the prompt")
    with pytest.raises(rt.UnsupportedModelError, match=rf"{kind}: .* use LoRA"):
        rt.apply(model, adapters="merged")


def test_refused_calls(compat: Any) -> None:
    model, _ = pair("mistral-window")
    bias = torch.zeros(len(ROWS), 1, IDS.shape[1], IDS.shape[1])
    refused: list[tuple[str, dict[str, Any]]] = [
        ("padding mask", {"attention_mask": bias}),
        ("max_length_q", {"cu_seq_lens_q": CU}),
        ("pack the sequences into one row", {"cu_seq_lens_q": CU, "max_length_q": 17}),
        ("expected", {"attention_mask": MASK[:, 1:]}),
        ("position_ids", {"position_ids": PLACES}),
        ("QuantizedCache", {"past_key_values": type("QuantizedCache", (), {"get_seq_length": lambda self: 0})()}),
    ]
    for text, inputs in refused:
        with pytest.raises(rt.CallError) as raised:
            model(IDS, **inputs)
        compat.refused("transformers", f"call with {', '.join(inputs)}", raised.value, text)
    with pytest.raises(rt.CallError, match="exactly one"):
        model()
    with pytest.raises(rt.CallError, match="max_position_embeddings"):
        model(torch.zeros(1, 129, dtype=torch.int64))
    half = pair("llama", torch.bfloat16)[0]
    with pytest.raises(rt.CallError, match=r"autocast to torch.float16 with"), torch.autocast("cpu", torch.float16):
        half(IDS)
    with pytest.raises(rt.CallError, match=r"inputs_embeds is torch.float32; expected torch.bfloat16"):
        half(inputs_embeds=torch.zeros(1, 4, 64))
    for flag in ("keep_probs", "statistics"):
        with pytest.raises(TypeError, match=f"token_logprobs: {flag}='no' must be True or False"):
            rt.token_logprobs(model, IDS, MASK, **{flag: "no"})
    with pytest.raises(rt.CallError, match="labels and targets"):
        rt.token_logprobs(model, IDS, labels=IDS, targets=IDS)
    with pytest.raises(rt.CallError, match="float32"):
        rt.token_logprobs(model, IDS, temperature=torch.ones(4, dtype=torch.bfloat16))


@torch.no_grad()
def test_targets_that_do_not_fit_the_input_are_named() -> None:
    """Targets of another shape must not be scored against the wrong rows."""
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
    """Each argument that does not fit raises our error before a kernel runs."""
    model, _ = pair("llama")
    ids = torch.arange(20).view(2, 10) + 5
    ones, zeros = torch.ones_like(ids), torch.zeros_like(ids)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("unknown argument temprature", {"temprature": 0.5}),
        (r"attention_mask is \(2, 9\)", {"attention_mask": ones[:, 1:]}),
        (r"attention_mask is \(2, 1, 10, 10\)", {"attention_mask": torch.ones(2, 1, 10, 10)}),
        (
            r"attention_mask is torch.float32 and holds values other than",
            {"attention_mask": ones.float().log2() - ones},
        ),
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


def test_apply_names_unsupported_models() -> None:
    for leaves in (0, -1, 3, "2", True):
        with pytest.raises(rt.UnsupportedModelError, match="tp_leaves is"):
            rt.apply(stock("llama"), tp_leaves=leaves)  # type: ignore[arg-type]
    with pytest.raises(rt.UnsupportedModelError, match=r"the model is a str; pass a loaded one"):
        rt.apply("Qwen/Qwen3-0.6B")  # type: ignore[arg-type]
    plain = stock("llama")
    mlp = plain.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.GELU())
    with pytest.raises(rt.UnsupportedModelError, match=r"layer 1 has a torch\.nn\..*Sequential as mlp.up_proj"):
        rt.apply(plain)
    assert not any("_rlkernel_chunks" in module.__dict__ for module in plain.modules())


@torch.no_grad()
def test_attention_interface_alone() -> None:
    """`attn_implementation="rlkernel"` in stock layers: close to stock, and refused with a cache."""
    plain = stock("qwen2-window")
    positions = (MASK.cumsum(1) - 1).clamp_min(0)
    expected = plain(IDS, attention_mask=MASK, position_ids=positions).logits
    plain.set_attn_implementation("rlkernel")
    found = plain(IDS, attention_mask=MASK, position_ids=positions).logits
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()], rtol=1e-4, atol=1e-4)
    with pytest.raises(rt.CallError, match="apply"):
        plain.generate(IDS, attention_mask=MASK, max_new_tokens=2, pad_token_id=0)
