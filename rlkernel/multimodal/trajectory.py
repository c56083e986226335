"""Packs the turns of a browser or mobile agent: screenshot and observation, then the action that the policy sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.multimodal.actions import ACTIONS, Action, parse_action
from rlkernel.multimodal.build import Row, build_batch, kinds_of
from rlkernel.multimodal.positions import mrope_positions
from rlkernel.multimodal.schema import Grounding, Medium, Modality, MultimodalBatch
from rlkernel.multimodal.screen import Screen
from rlkernel.multimodal.validation import validate


@dataclass(frozen=True)
class Turn:
    """One step of an agent.

    Attributes:
        observation: token ids before the action: template, tool result, environment, expanded placeholders.
        action: token ids that the policy sampled, with the token that ends the turn.
        text: the action as JSON, checked by `parse_action`; None for a turn without structure, such as a thought.
        reward: of this step.
        media: the screenshots of the observation.
    """

    observation: Sequence[int]
    action: Sequence[int]
    text: str | None = None
    reward: float = 0.0
    media: Sequence[Medium] = field(default_factory=tuple)


class Trajectories(NamedTuple):
    """Result of `pack_trajectories`.

    Attributes:
        batch: its loss spans are the actions, one per turn. Its grounding has the points of the actions' JSON, and a
            region for each action with a box, whose span is that of the action.
        rewards: [K] fp32, the reward of each loss span.
        turns: number of turns of each trajectory, as `ops.turn_advantages` takes them.
        actions: of each loss span; None for a turn without JSON.
    """

    batch: MultimodalBatch
    rewards: Tensor
    turns: list[int]
    actions: list[Action | None]


def pack_trajectories(
    trajectories: Sequence[Sequence[Turn]],
    screens: Sequence[Screen],
    coordinate_system: str,
    placeholder_ids: Mapping[Modality, int],
    *,
    sample_ids: Sequence[str] | None = None,
    actions: Mapping[str, Sequence[str]] = ACTIONS,
    merge_size: int = 2,
    tokens_per_second: float = 1.0,
) -> Trajectories:
    """Packs trajectories; the loss scores actions alone, and all other tokens are context.

    Args:
        screens: one per trajectory.
        coordinate_system: of the points and boxes in the actions.
        placeholder_ids: token ids that stand for screenshots in the observations.
        actions: allowed actions, as in `parse_action`.
        tokens_per_second: as in `mrope_positions`.

    Raises:
        ValueError: screens or names are not one per trajectory, an action is wrong, a turn has no action tokens, or
            placeholders and screenshots do not fit. The message names trajectory and turn, or sample and span.
    """
    names = list(sample_ids if sample_ids is not None else map(str, range(len(trajectories))))
    for what, given in (("screens", screens), ("sample_ids", names)):
        if len(given) != len(trajectories):
            raise ValueError(
                f"pack_trajectories: {len(given)} {what} for {len(trajectories)} trajectories; give one each"
            )
    rows, checked, action_spans = [], [], []
    for b, turns in enumerate(trajectories):
        ids: list[int] = []
        scored: list[bool] = []
        for t, turn in enumerate(turns):
            where = f"sample {names[b]!r}, turn {t}"
            if not turn.action or not turn.observation:
                raise ValueError(f"{where}: no {'action' if turn.observation else 'observation'} tokens; leave it out")
            ids += [*turn.observation, *turn.action]
            scored += [False] * len(turn.observation) + [True] * len(turn.action)
            action_spans.append((b, len(ids) - len(turn.action), len(ids)))
            action = None
            if turn.text is not None:
                action = parse_action(turn.text, screens[b], coordinate_system, where=where, actions=actions)
            checked.append(action)
        tokens = torch.tensor(ids, dtype=torch.int64)
        media = [medium for turn in turns for medium in turn.media]
        kinds, mask = kinds_of(tokens, placeholder_ids), torch.tensor(scored, dtype=torch.bool)
        rows.append(Row(tokens, kinds, media, scored=mask))
    batch = build_batch(rows, sample_ids=names, merge_size=merge_size, placeholder_ids=placeholder_ids)
    nowhere = (float("nan"), float("nan"))
    points = [nowhere if action is None else action.point or nowhere for action in checked]
    regions = [(span, action.box) for span, action in zip(action_spans, checked, strict=True) if action and action.box]
    grounding = Grounding(
        screen_size=torch.tensor(screens, dtype=torch.int64).reshape(-1, 2),
        coordinate_system=coordinate_system,
        region_spans=torch.tensor([span for span, _ in regions], dtype=torch.int64).reshape(-1, 3),
        bbox_targets=torch.tensor([box for _, box in regions], dtype=torch.float64).reshape(-1, 4),
        action_spans=torch.tensor(action_spans, dtype=torch.int64).reshape(-1, 3),
        point_targets=torch.tensor(points, dtype=torch.float64).reshape(-1, 2),
    )
    batch = replace(batch, grounding=grounding)
    validate(batch)
    batch = replace(batch, positions=mrope_positions(batch, tokens_per_second=tokens_per_second))
    rewards = torch.tensor([turn.reward for turns in trajectories for turn in turns], dtype=torch.float32)
    return Trajectories(batch, rewards, [len(turns) for turns in trajectories], checked)
