"""The tokenizer against transformers on the same directory, streaming against whole decoding, bad directories."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rlkernel.data.characters import character_tokenizer, save_tokenizer
from rlkernel.data.tokenizer import Tokenizer, TokenizerError, copy_tokenizer_files

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n",
    "12 + 34 = 46, so the answer is 46.",
    "naïve café, Größe, 你好 世界, 🙂 done",
]
CHAT = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}\n"
    "    {% if message.role == 'bad' %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}\n"
    "    {% if message.role == 'hidden' %}{% continue %}{% endif %}\n"
    "{{ '<|start|>' + message.role + '\n' }}"
    "{% generation %}{{ message.content | trim + eos_token + '\n' }}{% endgeneration %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
MESSAGES = [{"role": "user", "content": " What is 12 + 34? <b>&\"' "}, {"role": "assistant", "content": "46"}]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 and Qwen style: byte-level BPE, no token added around a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2 and Mistral style: spaces as ▁, unknown characters as byte tokens, a start token in front."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁"]
    words += sorted(set("".join(CORPUS[:3])) - {" ", "\n"})
    tokenizer = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


MADE: dict[str, tuple[Callable[[], tokenizers.Tokenizer], dict[str, str]]] = {
    "byte-level": (byte_level, {"eos_token": "<|end|>"}),
    "byte-fallback": (
        byte_fallback,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizer directories as transformers writes them, and the character tokenizer's own."""
    out = {}
    for name, (make, roles) in MADE.items():
        out[name] = tmp_path_factory.mktemp(name)
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=make(), clean_up_tokenization_spaces=False, **roles
        )
        fast.chat_template = CHAT
        fast.save_pretrained(out[name])
    out["characters"] = tmp_path_factory.mktemp("characters")
    save_tokenizer(character_tokenizer("0123456789+-= \nabc"), out["characters"])
    return out


KINDS = pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "characters"])


@KINDS
def test_same_ids_and_text_as_transformers(kind: str, directories: dict[str, Path]) -> None:
    ours, hf = Tokenizer(directories[kind]), transformers.AutoTokenizer.from_pretrained(directories[kind])
    for text in (*CORPUS, "", " ", "  two  spaces ", "12+3=15\n", "<|start|>user\nhi<|end|>"):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == hf(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(hf)
    assert (ours.eos_token_id, ours.bos_token_id) == (hf.eos_token_id, hf.bos_token_id)
    assert ours.pad_token_id == (hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id)
    assert set(hf.all_special_ids) <= ours.special_ids
    assert ours.token(ours.eos_token_id or 0) == hf.eos_token


@KINDS
@settings(max_examples=30, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_stream_adds_up(kind: str, data: st.DataObject, skip: bool, directories: dict[str, Path]) -> None:
    """Random ids, also broken UTF-8: the pieces and the rest make up the text of all ids; no piece is withdrawn."""
    tokenizer = Tokenizer(directories[kind])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream.finish() == ""


def test_stream_is_timely(directories: dict[str, Path]) -> None:
    """Whole characters come with their token; a character cut in two comes with its last byte."""
    tokenizer = Tokenizer(directories["byte-level"])
    stream = tokenizer.stream()
    ids = tokenizer.encode("answer is 46")
    assert [stream.push(i) for i in ids] == [tokenizer.decode([i]) for i in ids]
    cut = tokenizer.encode("😀")
    assert len(cut) > 1 and [stream.push(i) for i in cut] == [""] * (len(cut) - 1) + ["😀"]
    assert stream.push(tokenizer.eos_token_id or 0) == ""


def test_texts_of_single_tokens(directories: dict[str, Path]) -> None:
    text = "The 你🙂é done<|end|>"
    tokenizer = Tokenizer(directories["byte-level"])
    ids = tokenizer.encode(text)
    texts = tokenizer.token_texts(ids)
    assert len(texts) == len(ids) and "".join(texts) == text and not any("Ġ" in t or "\ufffd" in t for t in texts)
    assert texts[-1] == "<|end|>" and "" in texts, "a character of several tokens is the text of the last one"
    cut = ids[: texts.index("") + 1]
    assert tokenizer.token_texts(cut)[-1] == "\ufffd", "the bytes of a cut character have no text of their own"
    fallback = Tokenizer(directories["byte-fallback"])
    assert "".join(fallback.token_texts(fallback.encode("a 你 b"))) == "<s> a 你 b"
    assert tokenizer.token_texts([]) == []


def test_ids_without_a_token(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer(directories["byte-level"])
    assert tokenizer.decode([*tokenizer.encode("a"), 100_000]) == "a" and tokenizer.token(100_000) is None
    with pytest.raises(TokenizerError, match="token id -100 is negative"):
        tokenizer.decode([5, -100])


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"tools": [{"name": "größe", "x": "<b>"}]}])
def test_chat_template(variables: dict[str, Any], directories: dict[str, Path]) -> None:
    ours = Tokenizer(directories["byte-level"])
    hf = transformers.AutoTokenizer.from_pretrained(directories["byte-level"])
    for prompt in (True, False):
        text = ours.apply_chat_template(MESSAGES, add_generation_prompt=prompt, **variables)
        assert text == hf.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt, **variables)
    expected = hf.apply_chat_template(MESSAGES, add_generation_prompt=False, **variables)
    assert ours.encode(text, add_special_tokens=False) == expected["input_ids"]
    assert "hidden" not in ours.apply_chat_template([{"role": "hidden", "content": "x"}, *MESSAGES])


def test_chat_template_errors(directories: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer(directories["byte-level"])
    with pytest.raises(TokenizerError, match="unknown role bad"):
        tokenizer.apply_chat_template([{"role": "bad", "content": ""}])
    with pytest.raises(TokenizerError, match=r"no chat template 'rag' \(it has: default\)"):
        tokenizer.apply_chat_template(MESSAGES, template="rag")
    plain = Tokenizer(directories["characters"])
    with pytest.raises(TokenizerError, match="has no chat template; use plain text"):
        plain.apply_chat_template(MESSAGES)


def test_chat_template_is_sandboxed(directories: dict[str, Path], tmp_path: Path) -> None:
    """A template is untrusted data: it can neither reach Python's internals nor change the messages."""
    copy_tokenizer_files(directories["byte-level"], tmp_path)
    for source in (
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(TokenizerError, match="the chat template refused"):
            Tokenizer(tmp_path).apply_chat_template(MESSAGES)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="the chat template refused"):
        Tokenizer(tmp_path).apply_chat_template(MESSAGES)


def test_where_templates_come_from(directories: dict[str, Path], tmp_path: Path) -> None:
    copy_tokenizer_files(directories["byte-level"], tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).apply_chat_template([], template="rag") == "R"
    config["chat_template"] = "C"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).apply_chat_template([]) == "C"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("T")
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%Y')|length }}{{ bos_token is defined }}")
    assert Tokenizer(tmp_path).apply_chat_template([]) == "4False"
    target = tmp_path / "copy"
    target.mkdir()
    assert "additional_chat_templates" in copy_tokenizer_files(tmp_path, target)
    assert Tokenizer(target).apply_chat_template([], template="tools") == "T"


def test_tokens_of_the_configuration_alone(directories: dict[str, Path], tmp_path: Path) -> None:
    """Older directories list some special tokens only in tokenizer_config.json, or their roles only in the map."""
    copy_tokenizer_files(directories["byte-level"], tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    size = Tokenizer(tmp_path).vocab_size
    config["added_tokens_decoder"] = {str(size): {"content": "<|stop|>", "special": True}}
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|stop|>"}}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_token_id == size and tokenizer.encode("a<|stop|>")[-1] == size
    config["added_tokens_decoder"] = {str(size + 7): {"content": "<|stop|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=rf"'<\|stop\|>' has id {size + 7} in tokenizer_config.json and {size}"):
        Tokenizer(tmp_path)
    config["added_tokens_decoder"] = {"<|stop|>": {"content": "<|stop|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"added_tokens_decoder in tokenizer_config.json does not map token ids"):
        Tokenizer(tmp_path)


def test_saved_truncation_is_off(tmp_path: Path) -> None:
    backend = character_tokenizer("ab")
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    save_tokenizer(backend, tmp_path)
    assert Tokenizer(tmp_path).encode("abababab") == [2, 3] * 4


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json does not exist; expected a Hugging Face"):
        Tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"has no tokenizer.json"):
        copy_tokenizer_files(tmp_path, tmp_path)
    for name, message in (
        ("model/config.json", "is a run folder; its model is .*model"),
        ("adapter_config.json", "holds LoRA adapters; name"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        with pytest.raises(TokenizerError, match=message):
            Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"tokenizer.model is not supported"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is not a tokenizer of the tokenizers library"):
        Tokenizer(tmp_path)
    save_tokenizer(character_tokenizer("ab"), tmp_path)
    for text, message in (
        ("{", r"tokenizer_config.json is not JSON"),
        ("[]", r"tokenizer_config.json holds a JSON list"),
        ('{"eos_token": "<gone>"}', r"eos_token '<gone>' has no id"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=message):
            Tokenizer(tmp_path)


def test_no_transformers_import() -> None:
    """The wrapper works where transformers is not installed, and costs nothing until it is used."""
    import subprocess
    import sys

    code = "import sys, rlkernel.data.tokenizer; print({'transformers', 'tokenizers', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_added_token_flags(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<think>", special=False)])
    save_tokenizer(backend, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("a<think>b<|end|>")
    assert tokenizer.decode(ids) == "a<think>b" and tokenizer.eos_token_id is None and tokenizer.pad_token_id is None
