"""Samples completions with the engine, on the trainer's own model object, and computes their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkernel.data import prompts as data
from rlkernel.data.contents import is_chat
from rlkernel.data.errors import InputError
from rlkernel.data.rewards import Rewards, Scores, TrainerState
from rlkernel.engine import LLM, CacheTooSmallError, SamplingParams
from rlkernel.engine.sampling_params import mix_seed
from rlkernel.training.config import EvalSettings, RolloutSettings
from rlkernel.training.media import Prompt
from rlkernel.training.memory import PeakMemory
from rlkernel.training.parts import Parts
from rlkernel.training.turns import NOT_FINITE, Completion, OnFinished, Turns


class Sampler:
    """Rollouts of the model of a run, which is used in place; call `weights_updated` after each optimizer step.

    Attributes:
        llm: the engine. Its KV cache takes memory only while it samples, unless `engine.sleep` is off.
        memory: peak of the run's memory.
    """

    def __init__(self, parts: Parts):
        self.sleeps, self.ranks = parts.settings.engine.sleep, parts.ranks
        self.llm = LLM(parts.model, parts.tokenizer, **engine_sizes(parts))
        self.turns = Turns(self.llm, parts)
        self.memory = PeakMemory(parts.device, self.llm)
        self._rest()

    def weights_updated(self) -> None:
        """Drops the cached keys and values of the old weights."""
        self.llm.weights_updated()

    def sample(
        self,
        prompts: Sequence[Prompt],
        settings: RolloutSettings,
        seed: int,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """`settings.group_size` completions of each prompt, grouped by prompt.

        Args:
            seed: seeds each request together with the prompt's index.
            on_finished: called for each prompt while others are still being sampled.

        Raises:
            FloatingPointError: the model's logits are NaN or infinite.
        """
        filters = settings.top_k > 0 or settings.top_p < 1 or settings.min_p > 0
        params = [
            SamplingParams(
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                max_tokens=settings.max_tokens,
                n=settings.group_size,
                seed=mix_seed(seed, i) % (1 << 64),
                stop=settings.stop,
                return_kept=filters,
            )
            for i in range(len(prompts))
        ]
        return self._complete(prompts, params, on_finished)

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        settings: RolloutSettings,
        wanted: EvalSettings,
        on_finished: OnFinished | None = None,
    ) -> list[Completion]:
        """`wanted.samples` completions per prompt, grouped by prompt, with the same seeds each time."""
        params = [
            SamplingParams(
                temperature=wanted.temperature,
                n=wanted.samples,
                max_tokens=settings.max_tokens,
                seed=mix_seed(0, i) % (1 << 64),
                stop=settings.stop,
            )
            for i in range(len(prompts))
        ]
        return self._complete(prompts, params, on_finished)

    def _rest(self) -> None:
        self.memory.end_phase()
        if self.sleeps:  # graphs stay: capturing them again would take longer than the rest of sleeping and waking
            self.llm.sleep(keep_graphs=True)

    def _complete(
        self, prompts: Sequence[Prompt], params: list[SamplingParams], on_finished: OnFinished | None
    ) -> list[Completion]:
        self.memory.end_phase()
        self.llm.wake()
        try:
            completions = self._sample_own(prompts, params, on_finished)
        except CacheTooSmallError as error:
            raise InputError(f"engine.num_pages is too small: {error}") from None
        except ValueError as error:
            if not str(error).startswith("sample:"):
                raise
            raise FloatingPointError(NOT_FINITE) from error  # ops.sample checks logits on a CPU, not on a GPU
        self._rest()
        return completions

    def _sample_own(
        self, prompts: Sequence[Prompt], params: list[SamplingParams], on_finished: OnFinished | None
    ) -> list[Completion]:
        """Samples every `ranks.size`th prompt, from the rank's own on, and exchanges the completions.

        A prompt's completions depend on its seed alone, so they are the same on any rank.
        """
        ranks = self.ranks
        if ranks.size == 1:
            return self.turns.sample(prompts, params, on_finished)
        own = slice(ranks.rank, None, ranks.size)
        sampled = self.turns.sample(prompts[own], params[own]) if prompts[own] else []
        gathered = [iter(rows) for rows in ranks.gather([one.data() for one in sampled])]
        mine = iter(sampled)
        completions: list[Completion] = []
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            owner = i % ranks.size
            rows = [next(gathered[owner]) for _ in range(each.n)]
            group = [next(mine) if owner == ranks.rank else Completion.of(prompt, row) for row in rows]
            if on_finished is not None:
                on_finished(len(completions), group)
            completions += group
        return completions


def engine_sizes(parts: Parts) -> dict[str, Any]:
    """Arguments of the `LLM` that samples the rollouts and evaluations of a run, no larger than they need."""
    settings, rollout = parts.settings.engine, parts.settings.rollout
    context = parts.model.config.max_position_embeddings
    own_prompts = -(-rollout.prompts // parts.ranks.size)
    sequences = max(own_prompts * rollout.group_size, -(-len(parts.heldout) // parts.ranks.size))
    sizes = settings.model_dump(exclude={"sleep"})
    if parts.settings.train.shard == "weights":
        sizes["cuda_graphs"] = False  # graphs read weights at fixed addresses
    return {
        **sizes,
        "max_num_seqs": min(settings.max_num_seqs, sequences),
        "max_model_len": min(context, (parts.longest_prompt or context) + rollout.max_tokens),
    }


class Judging:
    """The rewards of one rollout: `add` starts those of a prompt's completions, `scores` waits for all."""

    def __init__(self, rewards: Rewards, state: TrainerState | None = None):
        self._pending = rewards.begin(state)

    def add(self, start: int, completions: Sequence[Completion]) -> None:
        """Passes completions on in TRL's form: messages for a chat prompt, text for a text prompt."""
        rows = [completion.prompt.row for completion in completions]
        answers: list[Any] = [c.messages if is_chat(c.prompt.row["prompt"]) else c.text for c in completions]
        arguments: dict[str, list[Any]] = {
            "prompts": [row["prompt"] for row in rows],
            "completions": answers,
            "completion_ids": [list(c.trajectory.completion) for c in completions],
            **data.columns_of(rows),
        }
        self._pending.add(start, arguments)
        for i, one in enumerate(completions, start):
            if one.failure is not None:
                self._pending.drop(i, one.failure)

    def scores(self) -> Scores:
        """Rewards of all added completions, in their order in the rollout."""
        return self._pending.result()
