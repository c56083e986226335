"""Encodes rows as token ids, once: rollout and training use these ids and never tokenize a text again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rlkernel.data.contents import WHERE, form_of
from rlkernel.data.errors import InputError
from rlkernel.data.files import Row
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.models.config import ModelConfig
from rlkernel.models.media import Medium
from rlkernel.training.batch import Trajectory
from rlkernel.training.media import ImagePrompts, Prompt

T = TypeVar("T")


class OverlongError(InputError):
    """A row that does not fit the model's context.

    Attributes:
        fact: the message without its remedy.
        lengths: tokens of the row by column.
    """

    def __init__(self, fact: str, lengths: dict[str, int]):
        super().__init__(f"{fact}; shorten it, or set data.overlong=drop")
        self.fact, self.lengths = fact, lengths


class Encoder:
    """Encodes rows, with the checks that need both tokenizer and model.

    Args:
        config: the model's, of which context, vocabulary and end-of-sequence tokens are used.
        max_tokens: tokens of the context that a prompt must leave free for its completion.
        template_args: variables of the chat template, such as `enable_thinking`.
        drops: leave rows that exceed the context out of `all_of` instead of refusing them.
        images: puts the images of a row into its prompt's ids; None: prompts have none.

    Attributes:
        dropped: for each row that `all_of` has left out, its place and its length.

    Raises:
        InputError: the chat template does not read one of the variables.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        template_args: Mapping[str, Any] | None = None,
        drops: bool = False,
        images: ImagePrompts | None = None,
    ):
        self.images = images
        self.config, self.tokenizer, self.max_tokens, self.drops = config, tokenizer, max_tokens, drops
        self.template_args = dict(template_args or {})
        self.dropped: list[str] = []
        self.limit = config.max_position_embeddings
        self._cache: dict[tuple[str, bool], list[int]] = {}
        try:
            tokenizer.check_template_args(self.template_args)
        except TokenizerError as error:
            raise InputError(f"data.chat_template_args: {error}") from None

    def all_of(self, rows: Iterable[Row], encode: Callable[[Row], T], source: str) -> list[T]:
        """The encoded rows, without those that exceed the context if the encoder drops them.

        Args:
            encode: `prompt`, `example` or `preference`.
            source: what an error calls the rows.

        Raises:
            InputError: a row cannot be encoded, or all rows are dropped.
        """
        encoded, first = [], len(self.dropped)
        for row in rows:
            try:
                encoded.append(encode(row))
            except OverlongError as error:
                if not self.drops:
                    raise
                self.dropped.append(error.fact)
        if len(self.dropped) > first and not encoded:
            raise InputError(
                f"{source}: data.overlong=drop leaves no row, because all exceed the model's context "
                f"({self.dropped[first]}); shorten the rows, or use a model with a longer context"
            )
        return encoded

    def prompt(self, row: Row) -> Prompt:
        """A prompt that leaves `max_tokens` of the context for its completion.

        Raises:
            OverlongError: it does not.
            InputError: the prompt cannot be encoded, or has a token that the model lacks.
        """
        where = row.get(WHERE, "prompt of the built-in task")
        ids = self._prompt_ids(row["prompt"], where)
        media: tuple[Medium, ...] = ()
        if self.images is not None:
            ids, media = self.images(row, ids)
        left = self.limit - len(ids)
        if left < self.max_tokens:
            raise OverlongError(
                f"{where}: the prompt has {len(ids)} tokens, which leaves {max(left, 0)} of the model's context of "
                f"{self.limit} for rollout.max_tokens={self.max_tokens}",
                {"prompt": len(ids)},
            )
        return Prompt(row, ids, media)

    def example(self, row: Row) -> Trajectory:
        """A supervised example; the end-of-sequence token is appended to a text completion.

        Raises:
            OverlongError: prompt and completion exceed the context.
            InputError: the row cannot be encoded, or has a token that the model lacks.
        """
        return self._trajectory(row, "completion", row.get(WHERE, "example of the built-in task"))

    def preference(self, row: Row) -> tuple[Trajectory, Trajectory]:
        """(chosen, rejected) of a preference row, encoded as two examples with the same prompt ids.

        Raises:
            OverlongError, InputError: as `example`.
        """
        where = row.get(WHERE, "preference of the built-in task")
        return self._trajectory(row, "chosen", where), self._trajectory(row, "rejected", where)

    def _trajectory(self, row: Row, column: str, where: str) -> Trajectory:
        prompt, completion = row["prompt"], row[column]
        form = form_of(prompt)
        if form == "messages":
            start = self._template(prompt, where, add_generation_prompt=True)
            full = self._template([*prompt, *completion], where, add_generation_prompt=False)
            if not full.startswith(start):
                raise InputError(
                    f"{where}: the chat template renders the conversation differently once the answer is added, so the "
                    f"answer's tokens cannot be separated; give prompt and {column} as text"
                )
            prompt_ids = self._ids(start, where, special=False)
            ids = self._ids(full[len(start) :], where, special=False)
        elif form == "text":
            end = self._end()
            prompt_ids = self._ids(prompt, where, special=True)
            ids = [*self._ids(completion, where, special=False), *([] if end is None else [end])]
        else:
            prompt_ids, ids = prompt, completion
        self._check(prompt_ids, where, "prompt", prompt)
        self._check(ids, where, column, completion)
        if len(prompt_ids) + len(ids) > self.limit:
            raise OverlongError(
                f"{where}: prompt and {column} have {len(prompt_ids) + len(ids)} tokens, the model's context is "
                f"{self.limit}",
                {"prompt": len(prompt_ids), column: len(ids)},
            )
        return Trajectory(prompt_ids, ids)

    def _end(self) -> int | None:
        """The tokenizer's end-of-sequence token if the model ends at it too, else the model's first."""
        own, ends = self.tokenizer.eos_token_id, self.config.eos_token_id
        if own is not None and (not ends or own in ends):
            return own
        return ends[0] if ends else None

    def _prompt_ids(self, prompt: Any, where: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self._ids(prompt, where, special=True)
        else:
            try:
                ids = self.tokenizer.encode_prompt(prompt, self.template_args)
            except TokenizerError as error:
                raise InputError(f"{where}: {error}") from None
        self._check(ids, where, "prompt", prompt)
        return ids

    def _ids(self, text: str, where: str, *, special: bool) -> list[int]:
        """Token ids; short texts are cached, because a small task repeats them a hundred thousand times."""
        key = (text, special)
        if key in self._cache:
            return self._cache[key]
        try:
            ids = self.tokenizer.encode(text, add_special_tokens=special)
        except TokenizerError as error:
            raise InputError(f"{where}: {error}") from None
        if len(text) < 32 and len(self._cache) < 65536:
            self._cache[key] = ids
        return ids

    def _template(self, messages: list[dict[str, Any]], where: str, *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, **self.template_args
            )
        except TokenizerError as error:
            raise InputError(f"{where}: {error}") from None

    def _check(self, ids: list[int], where: str, column: str, content: Any) -> None:
        if not ids:
            raise InputError(f"{where}: the {column} {str(content)[:60]!r} has no token; it must have at least one")
        size, token = self.config.vocab_size, max(ids)
        if token >= size:
            text = self.tokenizer.token(token)
            remedy = (
                "the row's token ids belong to another model" if text is None
                else f"its tokenizer has {text!r} there, so tokenizer and model do not belong together"
            )  # fmt: skip
            raise InputError(
                f"{where}: token id {token} in the {column} is not below the model's vocab_size {size}; {remedy}"
            )
