"""Tokenizer of a Hugging Face directory, with chat templates, on the `tokenizers` library alone.

It reads `tokenizer.json`. No code of the directory runs, and chat templates render in jinja2's sandbox.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer as Backend

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATE_DIR = "additional_chat_templates"
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class TokenizerError(ValueError):
    """A tokenizer directory, chat or token id that cannot be used; the message names it and says what to do."""


def local_directory(path: str | Path) -> Path:
    """The directory of a model: `path` if it exists, else the snapshot of that name in the Hugging Face hub's cache.

    The cache is `$HF_HUB_CACHE`, `$HF_HOME/hub` or `~/.cache/huggingface/hub`, and the snapshot that of branch `main`.
    Nothing is downloaded. If there is neither, `path` is returned.
    """
    directory = Path(path)
    if directory.exists() or not _HUB_NAME.fullmatch(str(path)):
        return directory
    folder = _hub_cache() / f"models--{str(path).replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return directory
    return snapshot if snapshot.is_dir() else directory


def no_directory(path: str | Path) -> str:
    """Error message for a model path that `local_directory` has not found."""
    if Path(path).exists():
        return f"{path} is not a directory; expected a Hugging Face model directory"
    if not _HUB_NAME.fullmatch(str(path)):
        return f"{path} does not exist; expected a local Hugging Face model directory"
    return (
        f"{path} does not exist and is not in the hub's cache {_hub_cache()}; expected a local Hugging Face model "
        f"directory (to get one: rlkernel fetch {path})"
    )


def mistaken(directory: Path) -> str | None:
    """The remedy where a run folder or a folder of adapters was named in place of a model, else None."""
    if (directory / "adapter_config.json").is_file():
        return "the directory holds LoRA adapters; name the merged model, in model/ of the same run"
    if (directory / "model" / "config.json").is_file():
        return f"the directory is a run folder; its model is {directory / 'model'}"
    return None


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template.

    Attributes:
        directory: the directory it was read from.
        special_tokens: text of the special token of each role that is set (`eos_token`, `pad_token`, ...).
        special_ids: ids that `decode` omits by default.
        bos_token_id, eos_token_id: ids, or None if the role is not set.
        pad_token_id: id of the padding token, else of the end-of-sequence token, else None.
    """

    def __init__(self, directory: str | Path) -> None:
        """Reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and the chat template.

        Raises:
            TokenizerError: the directory or a file is missing or malformed, or a special token has no id.
        """
        self.directory = local_directory(directory)
        if not self.directory.is_dir():
            raise TokenizerError(no_directory(directory))
        self._backend = _load_backend(self.directory)
        config = _read_object(self.directory / "tokenizer_config.json")
        roles = {**_read_object(self.directory / "special_tokens_map.json"), **config}
        _add_missing_tokens(self._backend, config, self.directory)
        self.special_tokens = {role: _content(roles[role]) for role in _ROLES if roles.get(role) is not None}
        self.bos_token_id = self._role_id("bos_token")
        self.eos_token_id = self._role_id("eos_token")
        own_pad = self._role_id("pad_token")
        self.pad_token_id = self.eos_token_id if own_pad is None else own_pad
        self._templates = _read_templates(self.directory, config)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def _role_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        if token is None:
            return None
        found = self._backend.token_to_id(token)
        if found is None:
            raise TokenizerError(f"{self.directory}: {role} {token!r} has no id; fix tokenizer_config.json")
        return int(found)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the largest id is below it in an ordinary vocabulary."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text, also an empty one.
            add_special_tokens: add the tokens that the tokenizer puts around a text, such as a start token. Set it to
                False for a rendered chat, which contains its special tokens as text.

        Raises:
            TokenizerError: the text contains half of a surrogate pair.
        """
        try:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # raised by the library for text that UTF-8 cannot encode
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is None:
                raise
            raise TokenizerError(
                f"the text is not Unicode: {text[at]!r} at position {at} is half of a surrogate pair; remove it"
            ) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids beyond the vocabulary, which a model with a padded one may sample, have no text.

        Raises:
            TokenizerError: an id is negative.
        """
        if any(i < 0 for i in ids):
            raise TokenizerError(f"token id {min(ids)} is negative; pass token ids without padding marks")
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The vocabulary's string of an id, or None if there is no such id."""
        return self._backend.id_to_token(token_id)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token of a sequence, special tokens included; the texts add up to that of the sequence.

        A character whose bytes lie in several tokens is the text of the last of them.
        """
        texts, shown = [], 0
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[:end], skip_special_tokens=False)
            complete = text if end == len(ids) else text.rstrip("\ufffd")
            texts.append(complete[shown:])
            shown = max(shown, len(complete))
        return texts

    def stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """Incremental decoder of one sequence, for streaming and stop strings."""
        return TextStream(self, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str = "default",
        **variables: Any,
    ) -> str:
        """Renders a conversation to text; encode it with `add_special_tokens=False`.

        Args:
            messages: objects with `role` and `content`.
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of functions.
            template: name of the template, if the directory has several.
            variables: further variables of the template (`enable_thinking=False`). Some templates print today's date
                unless `date_string` is given; give it if runs must be repeatable.

        Raises:
            TokenizerError: there is no such template, or it refuses the conversation.
        """
        source = self._templates.get(template)
        if source is None:
            known = ", ".join(sorted(self._templates))
            named = f"no chat template {template!r} (it has: {known})" if known else "no chat template"
            raise TokenizerError(f"{self.directory} has {named}; use plain text")
        values = {**self.special_tokens, "messages": list(messages), "tools": tools, "documents": None, **variables}
        try:
            return _compile(source).render(add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template is a program and may raise anything
            raise TokenizerError(f"{self.directory}: the chat template refused the messages: {error}") from None

    def encode_prompt(
        self, content: str | Sequence[int] | Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
    ) -> list[int]:
        """Token ids of a prompt: a text, chat messages, or token ids, which are returned as they are.

        The completion of messages that end with the user's or a tool's is a new message of the assistant. If they end
        with the assistant's, the completion continues it, as in TRL.

        Args:
            content: the prompt.
            template_args: further variables of the chat template.

        Raises:
            TokenizerError: the text is not Unicode, or the template refuses the messages.
        """
        if isinstance(content, str):
            return self.encode(content)
        messages = [item for item in content if not isinstance(item, int)]
        if not messages:
            return list(content)  # type: ignore[arg-type]
        continues = messages[-1]["role"] == "assistant"
        text = self.apply_chat_template(messages, add_generation_prompt=not continues, **template_args)
        if continues:
            begun = str(messages[-1]["content"]).strip()
            at = text.rfind(begun)
            if not begun or at < 0:
                raise TokenizerError(
                    f"{self.directory}: the chat template does not render the last message as it is, so it cannot be "
                    "continued; end the prompt with the user's message"
                )
            text = text[: at + len(begun)]
        return self.encode(text, add_special_tokens=False)

    def check_template_args(self, names: Collection[str], template: str = "default") -> None:
        """Checks that the chat template reads variables of these names, because it ignores any others.

        Raises:
            TokenizerError: it does not read one of them, or the name is set by rlkernel.
        """
        from jinja2 import TemplateError, meta

        for name in names:
            if name in ("messages", "add_generation_prompt", "template"):
                raise TokenizerError(f"{name!r} is set by rlkernel; leave it out")
        try:
            known = meta.find_undeclared_variables(_environment().parse(self._templates.get(template, "")))
        except TemplateError as error:
            raise TokenizerError(f"{self.directory}: the chat template is not valid: {error}") from None
        for name in names:
            if name not in known:
                raise TokenizerError(
                    f"the chat template of {self.directory} does not read {name!r}; it reads "
                    f"{', '.join(sorted(known)) or 'nothing, because there is none'}"
                )


class TextStream:
    """Incremental decoder: the pieces returned by `push` and `finish` add up to `decode` of all ids.

    Text that a later token could still change is held back: an unfinished UTF-8 character, or a run of byte tokens.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # Decoding starts at the last piece with text, because decoders strip or join depending on the token before.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is now final, which may be empty."""
        self._pending.append(token_id)
        token = self._tokenizer.token(token_id)
        silent = self._skip and token_id in self._tokenizer.special_ids
        if silent or token is None or _BYTE_TOKEN.fullmatch(token):
            return ""
        return self._take(final=False)

    def finish(self) -> str:
        """The text held back so far; call it once, after the last token."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        if not self._pending:
            return ""
        window = self._context + self._pending
        text = self._tokenizer.decode(window, skip_special_tokens=self._skip)
        if not final and text.endswith("\ufffd"):
            return ""
        piece = text[len(self._context_text) :]
        if piece:
            self._context = self._pending
            self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
            self._pending = []
        return piece


def copy_tokenizer_files(source: str | Path, target: str | Path) -> list[str]:
    """Copies a directory's tokenizer and chat template files to another; returns their names.

    Raises:
        TokenizerError: the source has no `tokenizer.json`.
    """
    source, target = local_directory(source), Path(target)
    if not (source / "tokenizer.json").is_file():
        raise TokenizerError(f"{source} has no tokenizer.json; expected a Hugging Face tokenizer directory")
    copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, target / name)
    if (source / _TEMPLATE_DIR).is_dir():
        shutil.copytree(source / _TEMPLATE_DIR, target / _TEMPLATE_DIR, dirs_exist_ok=True)
        copied.append(_TEMPLATE_DIR)
    return copied


def _load_backend(directory: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    file = directory / "tokenizer.json"
    if not file.is_file():
        hint = mistaken(directory) or "expected a Hugging Face tokenizer directory"
        if (directory / "tokenizer.model").is_file():
            hint = "tokenizer.model is not supported: save the tokenizer as a fast one with transformers"
        raise TokenizerError(f"{file} does not exist; {hint}")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for every malformed file
        raise TokenizerError(f"{file} is not a tokenizer of the tokenizers library: {error}") from None
    # Saved truncation or padding settings would silently change ids.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds a JSON {type(value).__name__}; expected an object")
    return value


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _add_missing_tokens(backend: Backend, config: dict[str, Any], directory: Path) -> None:
    """Adds tokens that only `tokenizer_config.json` lists, with its ids, as transformers does."""
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise TokenizerError(
            f"{directory}: added_tokens_decoder in tokenizer_config.json does not map token ids to tokens; save the "
            "tokenizer again with transformers"
        )
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = _content(entry)
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        token = AddedToken(content, special=bool(entry.get("special", False)), **flags)
        if backend.token_to_id(content) is None:
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        found = backend.token_to_id(content)
        if found != int(key):
            raise TokenizerError(
                f"{directory}: {content!r} has id {key} in tokenizer_config.json and {found} in tokenizer.json; "
                "the two files do not belong together"
            )


def _read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; a `chat_template.jinja` file wins over the one in `tokenizer_config.json`."""
    templates: dict[str, str] = {}
    for values in (_read_object(directory / "chat_template.json"), config):
        listed = values.get("chat_template")
        if isinstance(listed, str):
            templates["default"] = listed
        elif isinstance(listed, list):
            templates |= {str(entry["name"]): str(entry["template"]) for entry in listed}
    for file in sorted((directory / _TEMPLATE_DIR).glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return templates


@functools.cache
def _environment() -> jinja2.Environment:
    """The sandbox of chat templates, with the helpers that published templates expect."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks the assistant's tokens for loss masks; here it only renders its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)
