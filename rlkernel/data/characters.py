"""Character tokenizers for built-in tasks, saved as an ordinary Hugging Face tokenizer directory.

Every character is one token, so that ids, lengths and samples of a small run are easy to read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"


def character_tokenizer(alphabet: str) -> Tokenizer:
    """Tokenizer with one id per character: `<pad>` is 0, `<eos>` is 1, then the alphabet in its order.

    Args:
        alphabet: the characters, each once.

    Raises:
        ValueError: the alphabet is empty or repeats a character.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet must hold at least one character and each only once, got {alphabet!r}")
    vocab = {token: i for i, token in enumerate([PAD_TOKEN, EOS_TOKEN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers loads like any fast tokenizer."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Not `tokenizer.save`, which raises a bare Exception on a full disk.
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": EOS_TOKEN,
        "unk_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
