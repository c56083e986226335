"""Conversations of a rollout: turns of the model, each followed by an observation of the environment if there is one.

Sampled tokens stay as they were sampled, and each observation is encoded once and appended: nothing is encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlkernel.data.contents import is_chat
from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Failure, observation
from rlkernel.data.tokenizer import Tokenizer, TokenizerError
from rlkernel.engine import LLM, RequestOutput, SamplingParams
from rlkernel.engine.request import CompletionOutput
from rlkernel.training.batch import Trajectory
from rlkernel.training.media import Prompt
from rlkernel.training.parts import Parts

Message = dict[str, Any]
NOT_FINITE = (
    "the model computes logits that are NaN or infinite; start from an earlier checkpoint, lower optimizer.lr, or "
    "use bfloat16 if model.dtype is float16"
)
_TURN = "<<the assistant's turn>>"
"""Stands for a turn while the chat template renders what follows it."""


@dataclass(frozen=True)
class Completion:
    """One sampled completion: a turn, or with an environment several turns and the observations between them.

    Attributes:
        prompt: the prompt that it continues.
        trajectory: its token ids and the rollout's log-probabilities.
        text: without special tokens, with the observations.
        messages: its turns and observations.
        truncated: cut at `max_tokens`, without an end-of-sequence token or stop string, or without space for an
            observation and another turn.
        failure: why the environment has no answer, which drops the completion.
        turns: number of the assistant's turns.
    """

    prompt: Prompt
    trajectory: Trajectory
    text: str
    messages: list[Message]
    truncated: bool
    failure: Failure | None = None
    turns: int = 1

    @property
    def shown(self) -> str | list[Message]:
        """What records show: the text of a single turn, or turns and observations."""
        return self.text if len(self.messages) == 1 else self.messages

    def data(self) -> dict[str, Any]:
        """JSON data for other ranks: everything except the prompt, which they have, and the masks of kept tokens, which
        only the rank that trains on the completion reads."""
        one = self.trajectory
        assert one.logp is not None
        return {
            "completion": one.completion,
            "logp": one.logp.tolist(),
            "sampled": one.sampled,
            "text": self.text,
            "messages": self.messages,
            "truncated": self.truncated,
            "failure": None if self.failure is None else asdict(self.failure),
            "turns": self.turns,
        }

    @classmethod
    def of(cls, prompt: Prompt, data: dict[str, Any]) -> Completion:
        """The completion of a prompt from what `data` returned on another rank."""
        logp = torch.tensor(data["logp"], dtype=torch.float32)
        trajectory = Trajectory(prompt.ids, data["completion"], logp, sampled=data["sampled"])
        failure = None if data["failure"] is None else Failure(**data["failure"])
        return cls(prompt, trajectory, data["text"], data["messages"], data["truncated"], failure, data["turns"])


OnFinished = Callable[[int, list[Completion]], None]
"""Called with the position of a prompt's first completion and all its completions, once they are sampled."""


@dataclass
class Conversation:
    """A completion while it grows.

    Attributes:
        ids: token ids after the prompt.
        sampled: positions in `ids` of sampled tokens; `logps` and `kept` have a tensor for each turn.
        last: the engine's output of the last turn.
    """

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logps: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    last: CompletionOutput | None = None
    is_open: bool = True
    truncated: bool = False
    failure: Failure | None = None

    @property
    def turns(self) -> int:
        """Number of sampled turns."""
        return len(self.logps)

    def add_turn(self, turn: CompletionOutput) -> None:
        """Appends a sampled turn.

        Raises:
            FloatingPointError: a log-probability is NaN or infinite.
        """
        if not turn.logprobs_tensor.isfinite().all():
            raise FloatingPointError(NOT_FINITE)
        self.sampled += range(len(self.ids), len(self.ids) + len(turn.token_ids))
        self.ids += turn.token_ids
        self.logps.append(turn.logprobs_tensor)
        self.kept += [] if turn.kept is None else [turn.kept]
        self.messages.append({"role": "assistant", "content": turn.text})
        self.last = turn
        self.truncated = turn.finish_reason == "length"

    def completion(self, tokenizer: Tokenizer) -> Completion:
        """The conversation as it is now."""
        assert self.last is not None
        text = tokenizer.decode(self.ids[: -len(self.last.token_ids)]) + self.last.text
        sampled = None if len(self.sampled) == len(self.ids) else self.sampled
        kept = torch.cat(self.kept) if self.kept else None
        trajectory = Trajectory(self.prompt.ids, self.ids, torch.cat(self.logps), kept, sampled)
        return Completion(self.prompt, trajectory, text, self.messages, self.truncated, self.failure, self.turns)


class Turns:
    """Samples conversations turn by turn: all that are open at the same time, each round in one batch.

    The environment is called as soon as a turn is sampled, while the engine still decodes others.
    """

    def __init__(self, llm: LLM, parts: Parts):
        self.llm, self.environment, self.tokenizer = llm, parts.environment, parts.tokenizer
        self.template_args = parts.settings.data.chat_template_args
        self.max_turns = parts.settings.rollout.max_turns

    def sample(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], on_finished: OnFinished | None = None
    ) -> list[Completion]:
        """`params[i].n` completions of prompt i, of `params[i].max_tokens` tokens at most, grouped by prompt.

        The seed of each further turn derives from that of the turn before it.
        """
        groups = [[Conversation(prompt) for _ in range(each.n)] for prompt, each in zip(prompts, params, strict=True)]
        finished: dict[int, list[Completion]] = {}
        called: list[tuple[int, Conversation, Future[Any]]] = []  # (prompt, conversation, the environment's answer)

        def close(number: int) -> None:
            if not any(one.is_open for one in groups[number]) and number not in finished:
                finished[number] = [one.completion(self.tokenizer) for one in groups[number]]
                if on_finished is not None:
                    on_finished(sum(each.n for each in params[:number]), finished[number])

        def sample_turns(requests: Sequence[tuple[int, list[Conversation], SamplingParams]]) -> None:
            def take(i: int, output: RequestOutput) -> None:
                number, conversations, _ = requests[i]
                for one, turn in zip(conversations, output.outputs, strict=True):
                    one.add_turn(turn)
                    one.is_open = self.environment is not None and not one.truncated and one.turns < self.max_turns
                    if one.is_open:
                        called.append((number, one, self._call(one)))
                close(number)

            ids = [[*conversations[0].prompt.ids, *conversations[0].ids] for _, conversations, _ in requests]
            self.llm.generate(ids, [each for _, _, each in requests], take)

        sample_turns([(i, group, each) for i, (group, each) in enumerate(zip(groups, params, strict=True))])
        while called:
            answered, called = called, []
            requests = []
            for number, one, future in answered:
                self._observe(one, observation(future), params[number].max_tokens)
                if one.is_open:
                    assert one.last is not None
                    left, seed = params[number].max_tokens - len(one.ids), one.last.seed % (1 << 64)
                    requests.append((number, [one], replace(params[number], n=1, max_tokens=left, seed=seed)))
                close(number)
            if requests:
                sample_turns(requests)
        return [completion for i in range(len(groups)) for completion in finished[i]]

    def _call(self, one: Conversation) -> Future[Any]:
        assert self.environment is not None
        row = one.prompt.row
        prompt = row["prompt"]
        if isinstance(prompt, str) or not is_chat(prompt):
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            prompt = [{"role": "user", "content": text}]
        return self.environment.begin([*prompt, *one.messages], row)

    def _observe(self, one: Conversation, answer: list[Message] | Failure | None, max_tokens: int) -> None:
        """Appends the environment's answer, or closes the conversation."""
        one.is_open = False
        if isinstance(answer, Failure):
            one.failure = answer
        elif answer is not None:
            assert one.last is not None
            ids = observation_ids(self.tokenizer, self.template_args, one.prompt.row["prompt"], one.last, answer)
            if len(one.ids) + len(ids) >= max_tokens:
                one.truncated = True
                return
            one.ids += ids
            one.messages += answer
            one.is_open = True


def observation_ids(
    tokenizer: Tokenizer, template_args: dict[str, Any], prompt: Any, turn: CompletionOutput, answer: list[Message]
) -> list[int]:
    """Token ids that follow a turn's: of the observation as it is, or of what a chat template renders after the turn.

    The template renders the prompt, a placeholder for the turn and the observation, so that how it treats the content
    of earlier turns (some remove their reasoning) plays no part. An end-of-turn token that was sampled is not repeated.

    Raises:
        InputError: the template refuses the observation.
    """
    try:
        if not is_chat(prompt):
            return tokenizer.encode("".join(message["content"] for message in answer), add_special_tokens=False)
        begun = prompt[-1]["content"] if prompt[-1]["role"] == "assistant" else ""
        before = prompt[:-1] if begun else prompt
        text = tokenizer.apply_chat_template(
            [*before, {"role": "assistant", "content": begun + _TURN}, *answer], **template_args
        )
        _, placeholder, suffix = text.partition(_TURN)
        if not placeholder:
            raise TokenizerError(f"{tokenizer.directory}: the chat template does not render the assistant's content")
        ids = tokenizer.encode(suffix, add_special_tokens=False)
    except TokenizerError as error:
        raise InputError(f"rollout.environment: its observation cannot be rendered: {error}") from None
    return ids[1:] if ids and turn.token_ids[-1] == turn.stop_reason == ids[0] else ids
