"""LLM: outputs, seeds, stops, statistics of sampling; every bad request is an error that names the remedy."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONTEXT, EOS, VOCAB, fingerprint, make_model, shared_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlkernel.data.characters import character_tokenizer
from rlkernel.engine import (
    LLM,
    CacheTooSmallError,
    EmptyPromptError,
    PromptTooLongError,
    RequestError,
    SamplingParams,
    TokenizerMissingError,
    TokenOutOfRangeError,
)
from rlkernel.engine import llm as llm_module
from rlkernel.engine.request import StopStringMatcher
from rlkernel.models import KVCache, PackedBatch, save_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789+"  # 38 characters and two special tokens: VOCAB


@pytest.fixture
def llm():
    return LLM(shared_model("fp32"), character_tokenizer(ALPHABET), page_size=4)


# Outputs


def test_text_prompts_and_their_outputs(llm):
    outputs = llm.generate(["abc", "12+34"], SamplingParams(max_tokens=5, n=2, ignore_eos=True))
    assert [o.prompt for o in outputs] == ["abc", "12+34"]
    assert outputs[0].prompt_token_ids == [2, 3, 4]
    for output in outputs:
        assert [c.index for c in output.outputs] == [0, 1]
        for c in output.outputs:
            assert len(c.token_ids) == len(c.logprobs) == 5 and c.finish_reason == "length" and c.stop_reason is None
            assert c.logprobs_tensor.dtype == torch.float32 and c.logprobs_tensor.tolist() == c.logprobs
            assert c.text == llm.tokenizer.decode(c.token_ids) and c.kept is None
    assert llm.generate("abc", SamplingParams(max_tokens=1))[0].prompt == "abc"
    assert llm.generate([]) == []


def test_one_setting_per_prompt(llm):
    lengths = [3, 1, 7]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b", "c"], params)] == lengths
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], params[:2])


def test_a_finished_prompt_is_handed_over_while_others_are_decoded(llm):
    seen = []
    params = [SamplingParams(max_tokens=n, n=2, ignore_eos=True) for n in (3, 1, 7)]
    hand_over = lambda i, output: seen.append((i, output, llm.has_unfinished))
    outputs = llm.generate(["a", "b", "c"], params, hand_over)
    assert [(i, unfinished) for i, _, unfinished in seen] == [(1, True), (0, True), (2, False)]
    assert all(output is outputs[i] for i, output, _ in seen)


def test_token_ids_in_any_container(llm):
    params = SamplingParams(max_tokens=4, seed=0)
    outputs = llm.generate([[5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6])], params)
    assert len({fingerprint(o.outputs[0]) for o in outputs}) == 1


def test_context_ends_a_completion(llm):
    output = llm.generate([[5] * (CONTEXT - 3)], SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 3 and output.finish_reason == "length"
    short = LLM(shared_model("fp32"), max_model_len=10)
    assert len(short.generate([[5] * 4], SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0].token_ids) == 6


def test_kept_sets_name_what_was_sampled_from(llm):
    params = SamplingParams(max_tokens=6, top_k=3, return_kept=True, ignore_eos=True, n=2)
    for c in llm.generate(["abc"], params)[0].outputs:
        assert c.kept.dtype == torch.int32 and c.kept.shape == (6, 2)
        bits = (c.kept[:, :, None] >> torch.arange(32)) & 1
        mask = bits.reshape(6, 64).bool()
        assert mask.sum(1).ge(3).all() and mask[torch.arange(6), torch.tensor(c.token_ids)].all()
    mixed = [params, SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, top_k=3)]
    assert [o.outputs[0].kept is None for o in llm.generate(["a", "b", "c"], mixed)] == [False, True, True]


def test_shared_prompt_tokens_are_counted(llm):
    params = SamplingParams(max_tokens=2)
    assert llm.generate([[5] * 9], params)[0].num_cached_tokens == 0
    assert llm.generate([[5] * 9 + [6]], params)[0].num_cached_tokens == 8
    llm.weights_updated()
    assert llm.generate([[5] * 9 + [6]], SamplingParams(n=3))[0].num_cached_tokens == 2 * 10


# Seeds


def test_seeds():
    def sample(llm, prompts, params):
        return [c.token_ids for o in llm.generate(prompts, params) for c in o.outputs]

    model, free = shared_model("fp32"), SamplingParams(max_tokens=10, n=3, ignore_eos=True)
    first = sample(LLM(model), [[5], [5]], free)
    assert len({tuple(ids) for ids in first}) == 6, "each sample and request has its own stream"
    assert sample(LLM(model), [[5], [5]], free) == first, "the next engine has the same streams"
    assert sample(LLM(model, seed=1), [[5], [5]], free) != first
    llm = LLM(model)
    assert sample(llm, [[5]], free) + sample(llm, [[5]], free) == first, "requests are numbered over the engine's life"
    seeded = SamplingParams(max_tokens=10, n=3, ignore_eos=True, seed=9)
    assert sample(llm, [[5], [6]], seeded)[:3] == sample(llm, [[5]], seeded)


# Stops


def test_eos_ends_and_is_kept_as_a_token(llm):
    outputs = llm.generate(["abc"], SamplingParams(max_tokens=90, n=8))[0].outputs
    ended = [c for c in outputs if c.finish_reason == "stop"]
    assert ended
    for c in ended:
        assert c.token_ids.index(EOS) == len(c.token_ids) - 1 and c.stop_reason == EOS
        assert c.text == llm.tokenizer.decode(c.token_ids[:-1])


def test_stop_token_ids(llm):
    outputs = llm.generate(["abc"], SamplingParams(max_tokens=90, n=8, stop_token_ids=[10, 11], ignore_eos=True))
    for c in outputs[0].outputs:
        if c.finish_reason == "stop":
            assert c.stop_reason in (10, 11) and c.token_ids[-1] == c.stop_reason
            assert not {10, 11} & set(c.token_ids[:-1]) and c.text == llm.tokenizer.decode(c.token_ids[:-1])


def test_stop_strings_cut_the_text_and_keep_the_tokens(llm):
    """A stop string over two tokens: text before it, tokens up to the one completing it, nothing sampled after."""
    free = SamplingParams(max_tokens=12, n=4, seed=3, ignore_eos=True)
    full = llm.generate(["abc"], free)[0].outputs
    stop = full[0].text[4:6]
    stopped = llm.generate(["abc"], SamplingParams(max_tokens=12, n=4, seed=3, ignore_eos=True, stop=[stop, "zzz"]))
    for c, whole in zip(stopped[0].outputs, full, strict=True):
        at = whole.text.find(stop)
        if at < 0:
            assert (c.text, c.finish_reason) == (whole.text, "length")
        else:
            assert c.text == whole.text[:at] and c.finish_reason == "stop" and c.stop_reason == stop
            assert c.token_ids == whole.token_ids[: at + len(stop)]
            assert c.logprobs == whole.logprobs[: at + len(stop)]
    assert stopped[0].outputs[0].finish_reason == "stop"


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token, as in byte-level BPE without merges; characters outside ASCII take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    text=st.text(st.sampled_from("abé漢🙂 \n"), max_size=12),
    stop=st.text(st.sampled_from("aé漢🙂\n"), min_size=1, max_size=3),
)
def test_stop_watch_sees_what_decoding_everything_sees(text, stop):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text).ids
    matcher = StopStringMatcher(tokenizer.decode, (stop, "never here"))
    found = None
    for count, token in enumerate(ids, 1):
        found = matcher.push(token)
        assert (found is not None) == (stop in tokenizer.decode(ids[:count])), "found at the token that completes it"
        if found is not None:
            break
    assert found == (stop if stop in text else None)
    assert matcher.text == text.split(stop)[0] if found else matcher.text == text


def test_earliest_stop_string_wins():
    tokenizer = byte_tokenizer()
    matcher = StopStringMatcher(tokenizer.decode, ("cd", "bcd"))
    assert [matcher.push(t) for t in tokenizer.encode("abcd").ids][-1] == "bcd" and matcher.text == "a"


# Statistics


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7, "temperature": 2.0}])
def test_sampling_follows_the_softmax(params):
    """Chi-square of 6000 first tokens against the distribution over the kept set; draws are fixed by the seed."""
    model, draws = shared_model("fp32"), 6000
    prompt = [4, 9, 2]
    outputs = LLM(model, seed=2).generate([prompt], SamplingParams(max_tokens=1, n=draws, return_kept=True, **params))
    tokens = torch.tensor([c.token_ids[0] for c in outputs[0].outputs])
    logits = model.logits(model(PackedBatch.from_sequences([prompt]))[-1:])[0].detach().double()
    kept = outputs[0].outputs[0].kept
    if kept is not None:
        bits = ((kept[0, :, None] >> torch.arange(32)) & 1).reshape(-1)[:VOCAB].bool()
        logits = logits.masked_fill(~bits, float("-inf"))
    p = (logits / params.get("temperature", 1.0)).softmax(-1)
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert counts[p == 0].sum() == 0
    common = p * draws >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([p[common] * draws, (p[~common].sum() * draws)[None]])
    chi2 = float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = int(common.sum())
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5, f"chi-square {chi2:.1f} with {freedom} degrees of freedom"


# Bad requests


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], {}, EmptyPromptError, r"prompts\[1\] is empty; a prompt needs at least one token"),
        ("", {}, EmptyPromptError, r"prompts\[1\] is empty"),
        ([5] * CONTEXT, {}, PromptTooLongError, f"{CONTEXT} tokens; a context of max_model_len={CONTEXT}"),
        ([3, VOCAB, 1], {}, TokenOutOfRangeError, rf"prompts\[1\]\[1\] is token id {VOCAB}; .* 0 to {VOCAB - 1}"),
        ([3, 4, -1], {}, TokenOutOfRangeError, r"prompts\[1\]\[2\] is token id -1"),
        ([1.5, 2.0], {}, RequestError, "holds float64"),
        ([[1, 2]], {}, RequestError, r"shape \(1, 2\)"),
        (7, {}, RequestError, "is int; expected text or a list of token ids"),
        (
            [5] * 20,
            {"max_tokens": 58},
            CacheTooSmallError,
            "20 pages of 4; the cache has num_pages=15: raise num_pages",
        ),
    ],
)
def test_bad_prompt_is_an_error_and_starts_nothing(prompt, params, error, message):
    llm = LLM(shared_model("fp32"), character_tokenizer(ALPHABET), page_size=4, num_pages=15)
    with pytest.raises(error, match=message):
        llm.generate([[5, 6], prompt], SamplingParams(**params))
    assert not llm.has_unfinished and not llm.scheduler.busy and issubclass(error, ValueError)
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


def test_text_needs_a_tokenizer():
    llm = LLM(shared_model("fp32"))
    with pytest.raises(TokenizerMissingError, match="is text, and the engine has no tokenizer"):
        llm.generate(["abc"])
    with pytest.raises(TokenizerMissingError, match="use stop_token_ids"):
        llm.generate([[1, 2]], SamplingParams(stop="x"))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_model_len"])
def test_bad_size(name):
    with pytest.raises(ValueError, match=f"LLM: {name}=0"):
        LLM(shared_model("fp32"), **{name: 0})


def test_the_cache_leaves_attention_its_scratch_memory(monkeypatch):
    """On a GPU, the memory that a step needs in addition to its results is not given to the cache."""
    config = make_model().config
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, new_empty=torch.empty)
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 24, 1 << 30))
    page = KVCache.page_bytes(config, 16, torch.float32)
    for scratch in (0, 3 << 20, 1 << 30):

        def scratch_bytes(q, k, scratch=scratch, **most):
            asked.append((q.shape, k.shape, most))
            return scratch

        monkeypatch.setattr(llm_module.ops, "attention_scratch_bytes", scratch_bytes)
        pages = llm_module._default_pages(SimpleNamespace(config=config, head_weight=weight), 16, 4, 10**6, 512)
        assert pages == max(4, max(0, (1 << 24) - scratch) // 2 // page)
    heads = [(0, n, config.head_dim) for n in (config.num_heads, config.num_kv_heads)]
    assert asked[0] == (*heads, {"tokens": 512, "sequences": 10**6, "longest": 64})


def test_longer_context_than_the_model():
    with pytest.raises(ValueError, match=f"max_model_len=97, but the model's max_position_embeddings is {CONTEXT}"):
        LLM(shared_model("fp32"), max_model_len=97)
    with pytest.raises(PromptTooLongError, match="takes at most 7 and one new token: shorten it, or raise max_model"):
        LLM(shared_model("fp32"), max_model_len=8).generate([[5] * 8])


def test_bad_scores():
    llm = LLM(shared_model("fp32"))
    with pytest.raises(EmptyPromptError, match=r"token_ids\[0\] has one token; scoring needs at least two"):
        llm.score([[3]])
    with pytest.raises(ValueError, match=r"temperature\[1\]=0.0"):
        llm.score([[3, 4], [3, 4]], temperature=[1.0, 0.0])
    assert llm.score([[3] * CONTEXT])[0].shape == (CONTEXT - 1,), "a whole context can be scored"
    with pytest.raises(PromptTooLongError):
        llm.score([[3] * (CONTEXT + 1)])


def test_weights_cannot_change_under_running_requests(llm):
    llm.add_request("abc", SamplingParams(max_tokens=4, ignore_eos=True))
    llm.step()
    with pytest.raises(RuntimeError, match="1 requests are unfinished"):
        llm.weights_updated()
    with pytest.raises(RuntimeError, match="1 requests of add_request are unfinished"):
        llm.generate(["abc"])
    llm.abort_all()
    llm.weights_updated()
    assert llm.step() == [] and llm.blocks.available == llm.num_pages


def test_an_error_in_a_step_leaves_a_clean_engine(monkeypatch):
    model = make_model("fp32")
    llm = LLM(model, page_size=4)
    params = SamplingParams(max_tokens=6, seed=1)
    expected = fingerprint(llm.generate([[5] * 9], params)[0].outputs[0])
    llm.weights_updated()
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", lambda self, batch: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 9], params)
    assert not llm.has_unfinished and llm.blocks.available == llm.num_pages
    assert fingerprint(llm.generate([[5] * 9], params)[0].outputs[0]) == expected, "pages never written are not found"


def test_model_directory(tmp_path):
    from rlkernel.data.characters import save_tokenizer

    save_tokenizer(character_tokenizer(ALPHABET), tmp_path / "tokenizer")
    model = shared_model("fp32")
    save_model(model, tmp_path / "model", tmp_path / "tokenizer")
    params = SamplingParams(max_tokens=6, seed=4, stop="q")
    (loaded,) = LLM(tmp_path / "model").generate(["abc"], params)
    (direct,) = LLM(model, character_tokenizer(ALPHABET)).generate(["abc"], params)
    assert fingerprint(loaded.outputs[0]) == fingerprint(direct.outputs[0])


def test_the_guides_example_runs(capsys):
    guide = Path(__file__).parents[2] / "docs" / "guides" / "engine.md"
    example = guide.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(example, str(guide), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 8
