"""Compares the layout of a rollout's batch and a trainer's: media, placeholders, token ids, positions, masks, losses.

Each sample is compared in that order up to its first difference, because one missing token shifts all that follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from rlkernel.multimodal.schema import Modality, MultimodalBatch
from rlkernel.multimodal.validation import BROKEN_MEDIA, Problem, check_shapes, problems

_SHOWN = 8


@dataclass(frozen=True)
class LayoutFinding:
    """A difference.

    Attributes:
        cause: a stable name, in the table of docs/multimodal/layout.md.
        sample: name of the first sample that has it; samples: how many have it.
        begin, end: the tokens of the sample that differ.
        rollout, train: the two sides, in words.
        remedy: what to do.
    """

    cause: str
    sample: str
    begin: int
    end: int
    rollout: str
    train: str
    remedy: str
    samples: int = 1

    def __str__(self) -> str:
        place = f"sample {self.sample!r}, tokens {self.begin} to {max(self.begin, self.end - 1)}"
        return f"{self.cause}: {place}: rollout {self.rollout}; train {self.train}; {self.remedy}"


@dataclass(frozen=True)
class Layout:
    """Result of `compare_layout`.

    Attributes:
        findings: one per cause, ordered by sample; empty if the layouts are equal.
        samples: compared samples; differing: those with a finding.
        compared: what both sides state, in words.
        unknown: what a side does not state, so that it was not compared.
    """

    findings: list[LayoutFinding]
    samples: int
    differing: int = 0
    compared: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"layout: {self.differing} of {self.samples} samples differ"]
        for found in self.findings:
            lines += [
                f"{found.cause} ({found.samples} of {self.samples} samples): sample {found.sample!r}, "
                f"tokens {found.begin} to {max(found.begin, found.end - 1)}",
                f"  rollout  {found.rollout}",
                f"  train    {found.train}",
                f"  remedy   {found.remedy}",
            ]
        lines.append(f"compared: {', '.join(self.compared)}")
        if self.unknown:
            lines.append(f"not compared: {', '.join(self.unknown)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Pair:
    """Sample i of the rollout and sample j of the trainer."""

    rollout: MultimodalBatch
    train: MultimodalBatch
    i: int
    j: int

    def finding(self, cause: str, begin: int, end: int, words: Sequence[str], remedy: str) -> LayoutFinding:
        rollout, train = words
        return LayoutFinding(cause, self.rollout.sample_ids[self.i], begin, end, rollout, train, remedy)

    def ids(self) -> tuple[Tensor, Tensor]:
        a, b = self.rollout.ranges[self.i], self.train.ranges[self.j]
        return self.rollout.token_ids[a], self.train.token_ids[b]


def compare_layout(rollout: MultimodalBatch, train: MultimodalBatch) -> Layout:
    """Compares two batches of the same samples, which are matched by `sample_ids`, else by their order.

    Samples with one id, such as the completions of a prompt, are matched in their order.

    Raises:
        ValueError: no sample can be matched, or a tensor has another shape than the schema's.
    """
    check_shapes(rollout)
    check_shapes(train)
    pairs = [_Pair(rollout, train, i, j) for i, j in _matches(rollout, train)]
    own = [_own_problems(rollout), _own_problems(train)]
    known = _digests_known(rollout, train)
    contents = [[_content(batch, k, known) for k in range(batch.samples)] for batch in (rollout, train)]
    findings: dict[str, LayoutFinding] = {}
    counts: dict[str, int] = {}
    for pair in pairs:
        found = next(_differences(pair, own, contents), None)
        if found is not None:
            findings.setdefault(found.cause, found)
            counts[found.cause] = counts.get(found.cause, 0) + 1
    if not findings and not known:
        # equal grids do not show that the pixels are equal
        for name, left, right in _settings(rollout, train, both=True)[:1]:
            found = pairs[0].finding("processor-settings", 0, 1, [f"{name}={left}", f"{name}={right}"], _SAME_PROCESSOR)
            findings[found.cause], counts[found.cause] = found, len(pairs)
    compared, unknown = _scope(rollout, train)
    for batch, side, other in ((rollout, "the rollout", "training"), (train, "training", "the rollout")):
        if batch.samples > len(pairs):
            unknown.append(f"{batch.samples - len(pairs)} samples of {side} that are not in {other}")
    listed = [replace(found, samples=counts[cause]) for cause, found in findings.items()]
    return Layout(listed, len(pairs), sum(counts.values()), compared, unknown)


def _matches(rollout: MultimodalBatch, train: MultimodalBatch) -> list[tuple[int, int]]:
    place = {name: j for j, name in enumerate(_numbered(train.sample_ids))}
    found = [(i, place[name]) for i, name in enumerate(_numbered(rollout.sample_ids)) if name in place]
    if not found and rollout.samples == train.samples:
        found = [(i, i) for i in range(rollout.samples)]
    if not found:
        raise ValueError(
            f"no sample of the rollout ({', '.join(rollout.sample_ids[:3])}, ...) has the id of one in training "
            f"({', '.join(train.sample_ids[:3])}, ...); give both sides the same ids"
        )
    return found


def _numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Names with the number of their occurrence."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


def _own_problems(batch: MultimodalBatch) -> dict[int, Problem]:
    first: dict[int, Problem] = {}
    for problem in problems(batch):
        first.setdefault(problem.sample, problem)
    return first


def _differences(pair: _Pair, own: list[dict[int, Problem]], contents: list[_Contents]) -> Iterator[LayoutFinding]:
    problem = own[0].get(pair.i) or own[1].get(pair.j)
    if problem is None or problem.cause not in BROKEN_MEDIA:
        yield from _media(pair, *contents)
    if problem is not None:
        sides = zip(own, (pair.rollout, pair.train), (pair.i, pair.j), strict=True)
        words = [_side_words(found.get(at), batch, at, problem.begin) for found, batch, at in sides]
        yield pair.finding(problem.cause, problem.begin, problem.end, words, problem.message.rpartition("; ")[2])
    if _dropped(pair):
        return
    yield from _token_ids(pair)
    yield from _spans(pair)
    yield from _positions(pair)
    yield from _attention(pair)
    yield from _losses(pair)


def _dropped(pair: _Pair) -> bool:
    """Whether training keeps only the prompt and scores nothing, as TRL does with truncated completions."""
    a, b = pair.ids()
    scored = pair.train.scored[pair.train.ranges[pair.j]]
    return len(b) < len(a) and torch.equal(a[: len(b)], b) and not bool(scored.any()) and bool(pair.train.scored.any())


def _side_words(problem: Problem | None, batch: MultimodalBatch, sample: int, token: int) -> str:
    """A side's own problem, or what it has at the token of the other side's."""
    if problem is not None:
        return problem.message.partition(": ")[2].rpartition("; ")[0]
    run = next(((b, e, kind.name.lower()) for b, e, kind, _ in batch.runs[sample] if b <= token < e), None)
    return "no placeholder there" if run is None else f"{run[1] - run[0]} placeholder tokens of one {run[2]}"


# ---- media ---------------------------------------------------------------------------------------------------------

_Contents = list[list[tuple[Any, ...]]]
"""Modality, grid and, where all are known, digest of the media of each sample."""
_SAME_PROCESSOR = "give both sides the same processor and mm_processor_kwargs"
_SAME_ORDER = "keep media in the order of their placeholders, sample by sample"


def _settings(rollout: MultimodalBatch, train: MultimodalBatch, *, both: bool) -> list[tuple[str, object, object]]:
    """Settings of the processors that differ; with `both` only those that both sides state."""
    a, b = rollout.processor_fingerprint, train.processor_fingerprint
    if a is None or b is None:
        return []
    budgets = [{"min_pixels": f.min_pixels, "max_pixels": f.max_pixels} for f in (a, b)]
    left, right = ({**budget, **f.settings} for budget, f in zip(budgets, (a, b), strict=True))
    names = sorted(left.keys() & right.keys() if both else left.keys() | right.keys())
    values = [(name, left.get(name), right.get(name)) for name in names]
    return [(name, x, y) for name, x, y in values if x != y and not (both and None in (x, y))]


def _digests_known(rollout: MultimodalBatch, train: MultimodalBatch) -> bool:
    return all(m.digest for m in (*rollout.media, *train.media))


def _content(batch: MultimodalBatch, sample: int, known: bool) -> list[tuple[Any, ...]]:
    media = [batch.media[m] for m in batch.media_of_samples[sample]]
    return [(m.modality, m.grid, *((m.digest,) if known else ())) for m in media]


def _media(pair: _Pair, rollout: _Contents, train: _Contents) -> Iterator[LayoutFinding]:
    left, right = rollout[pair.i], train[pair.j]
    if left == right:
        return
    at = _first_difference(left, right)
    begin, end = next(iter(_runs_of(pair.rollout, pair.i, at)), (0, 1))
    words = [_medium_words(side, at) for side in (left, right)]
    if len(left) != len(right):
        counts = [f"{len(side)} media" for side in (left, right)]
        yield pair.finding("media-count", begin, end, counts, "pass each image and video of the prompt to both sides")
        return
    has_digests = len(right[at]) > 2
    # a grid alone is weak evidence for an image, all grids of a sample are better
    others = [k for k, media in enumerate(rollout) if (right[at] in media if has_digests else right == media)]
    if sorted(map(str, left)) == sorted(map(str, right)):
        words[1] += " in another order"
        yield pair.finding("swapped-media", begin, end, words, _SAME_ORDER)
    elif others:
        words[1] += f", which the rollout shows in sample {pair.rollout.sample_ids[others[0]]!r}"
        yield pair.finding("swapped-media", begin, end, words, _SAME_ORDER)
    elif differ := _settings(pair.rollout, pair.train, both=False):
        name, x, y = differ[0]
        words = [f"{word} ({name}={value})" for word, value in zip(words, (x, y), strict=True)]
        yield pair.finding("processor-settings", begin, end, words, _SAME_PROCESSOR)
    elif left[at][:2] == right[at][:2]:
        remedy = "resize and normalise once, on one device, and pass the same pixels to both sides"
        yield pair.finding("pixels-differ", begin, end, words, remedy)
    else:
        yield pair.finding("resized", begin, end, words, _SAME_PROCESSOR)


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int:
    return next((k for k, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))


def _runs_of(batch: MultimodalBatch, sample: int, number: int) -> list[tuple[int, int]]:
    media = batch.media_of_samples[sample]
    wanted = media[number] if number < len(media) else -1
    return [(begin, end) for begin, end, _, m in batch.runs[sample] if m == wanted]


def _medium_words(media: list[tuple[Any, ...]], at: int) -> str:
    if at >= len(media):
        return "no such medium"
    kind, grid, *digest = media[at]
    return f"{kind.name.lower()} of grid {'x'.join(map(str, grid))}{f', digest {digest[0][:12]}' if digest else ''}"


# ---- tokens --------------------------------------------------------------------------------------------------------


def _token_ids(pair: _Pair) -> Iterator[LayoutFinding]:
    a, b = pair.ids()
    if torch.equal(a, b):
        return
    n = min(len(a), len(b))
    unequal = torch.nonzero(a[:n] != b[:n])
    begin = int(unequal[0]) if len(unequal) else n
    # one token of padding shows only where the source had padding: any first token is a run of one token id
    least = [1 if batch.padding_side != "none" else 2 for batch in (pair.rollout, pair.train)]
    padding = [_padding(b, a, least[0]), _padding(a, b, least[1])]
    if any(padding):
        words = [
            f"begins with {_numbers(x)}{f': {k} padding tokens are attended to' if k else ''}"
            for x, k in zip((a, b), padding, strict=True)
        ]
        remedy = "build the attention mask for the side on which the ids are padded"
        yield pair.finding("padding-side", 0, max(padding), words, remedy)
        return
    unequal = torch.nonzero(a.flip(0)[: n - begin] != b.flip(0)[: n - begin])
    tail = int(unequal[0]) if len(unequal) else n - begin
    left, right = a[begin : len(a) - tail], b[begin : len(b) - tail]
    templates = [
        f.chat_template if f else "" for f in (pair.rollout.processor_fingerprint, pair.train.processor_fingerprint)
    ]
    cause = "chat-template" if all(templates) and templates[0] != templates[1] else "tokens-differ"
    remedy = "pass the rollout's token ids to the trainer instead of rendering and tokenising again"
    yield pair.finding(cause, begin, max(len(a), len(b)) - tail, [_numbers(left), _numbers(right)], remedy)


def _padding(a: Tensor, b: Tensor, least: int) -> int:
    """Length of the padding, of one token id, by which b is a shifted copy of a; 0 if b is none."""
    if len(a) != len(b):
        return 0
    for padded, copied in ((b, a), (b.flip(0), a.flip(0))):  # padding before, padding behind
        changes = torch.nonzero(padded != padded[0])
        run = int(changes[0]) if len(changes) else len(padded) - 1
        for k in range(least, run + 1):
            if torch.equal(padded[k:], copied[:-k]):
                return k
    return 0


def _numbers(ids: Tensor) -> str:
    shown = ", ".join(map(str, ids[:_SHOWN].tolist()))
    return f"[{shown}{', ...' if len(ids) > _SHOWN else ''}]"


def _spans(pair: _Pair) -> Iterator[LayoutFinding]:
    left, right = ([s[:3] for s in b.runs[k]] for b, k in ((pair.rollout, pair.i), (pair.train, pair.j)))
    if left != right:
        at = _first_difference(left, right)
        words = [
            f"{s[at][2].name.lower()} at tokens {s[at][0]} to {s[at][1] - 1}" if at < len(s) else "no such span"
            for s in (left, right)
        ]
        begin, end, _ = (left if at < len(left) else right)[at]
        remedy = "build the token types from the token ids that the model receives"
        yield pair.finding("moved-media", begin, end, words, remedy)


# ---- positions and masks -------------------------------------------------------------------------------------------

_PASS_POSITIONS = "pass the positions of `mrope_positions` to the model"


def _positions_of(batch: MultimodalBatch, sample: int, axes: tuple[str, ...]) -> Tensor:
    assert batch.positions is not None
    rows = [batch.axes.index(axis) if len(batch.axes) > 1 else 0 for axis in axes]
    return torch.stack([batch.positions[row, batch.ranges[sample]] for row in rows])


def _axes(rollout: MultimodalBatch, train: MultimodalBatch) -> tuple[str, ...]:
    """The axes that both sides have; a single axis is compared with each of the three."""
    if rollout.positions is None or train.positions is None:
        return ()
    if 1 in (len(rollout.axes), len(train.axes)):
        longer = max(rollout.axes, train.axes, key=len)
        return longer if len(longer) == 1 else tuple(axis for axis in longer if axis != "text")
    return tuple(axis for axis in rollout.axes if axis in train.axes)


def _positions(pair: _Pair) -> Iterator[LayoutFinding]:
    axes = _axes(pair.rollout, pair.train)
    if not axes:
        return
    a, b = _positions_of(pair.rollout, pair.i, axes), _positions_of(pair.train, pair.j, axes)
    if torch.equal(a, b):
        return
    token = int(torch.nonzero((a != b).any(0))[0])
    differ = [axis for axis, x, y in zip(axes, a[:, token], b[:, token], strict=True) if x != y]
    last = int(torch.nonzero((a != b).any(0))[-1])
    words = [f"({', '.join(axes)}) = {tuple(x[:, token].tolist())}" for x in (a, b)]
    finding = lambda cause, remedy: pair.finding(cause, token, last + 1, words, remedy)
    flat = [bool((x == x[:1]).all()) for x in (a, b)]
    # read the axes of b in another order: order[k] is the row of b that holds axis k
    order = next((p for p in permutations(range(len(axes))) if torch.equal(b[list(p)], a)), None)
    after_video = any(token == end and kind == Modality.VIDEO for _, end, kind, _ in pair.rollout.runs[pair.i])
    if order is not None:
        found = ", ".join(axes[order.index(k)] for k in range(len(axes)))
        words[1] += f": its rows are ({found})"
        yield finding("axis-order", "reorder the rows of the positions")
    elif len(axes) > 1 and flat[0] != flat[1]:
        words[flat.index(True)] += ", one axis for text and media alike"
        yield finding("positions-flat", _PASS_POSITIONS)
    elif bool(((b - a) == (b - a)[0, 0]).all()):
        words[1] += f": all are shifted by {int((b - a)[0, 0])}, as if padding were counted"
        yield finding("positions-shift", "count positions from the first token that is attended to")
    elif differ == ["temporal"] or after_video:
        words = [f"{word}{' after a video' if after_video else ''}" for word in words]
        remedy = f"take the time between temporal patches from the frames that were sampled, and {_PASS_POSITIONS}"
        yield finding("temporal-positions", remedy)
    else:
        yield finding("positions-differ", _PASS_POSITIONS)


def _attention(pair: _Pair) -> Iterator[LayoutFinding]:
    masks = [
        torch.ones(len(ids), dtype=torch.bool) if b.attention_mask is None else b.attention_mask[b.ranges[k]]
        for b, k, ids in zip((pair.rollout, pair.train), (pair.i, pair.j), pair.ids(), strict=True)
    ]
    if not torch.equal(*masks):
        begin, end = _first_run(masks[0] != masks[1])
        words = ["attends to them" if mask[begin] else "masks them out" for mask in masks]
        yield pair.finding("attention-mask", begin, end, words, "mask padding only")


def _losses(pair: _Pair) -> Iterator[LayoutFinding]:
    if not len(pair.rollout.loss_spans) or not len(pair.train.loss_spans):
        return
    a = pair.rollout.scored[pair.rollout.ranges[pair.i]]
    b = pair.train.scored[pair.train.ranges[pair.j]]
    if torch.equal(a, b):
        return
    begin, end = _first_run(a != b)
    only_rollout = bool(a[begin])
    words = ["scores them", "does not score them"]
    left, right = words if only_rollout else words[::-1]
    ids = _numbers(pair.ids()[0][begin:end])
    follows_turn = end == begin + 1 and begin > 0 and bool(a[begin - 1] and b[begin - 1])
    without = pair.train if only_rollout else pair.rollout  # where the turn ends one token before
    if follows_turn and not _ends_turns(without, int(pair.ids()[0][begin - 1])):
        cause, what = "turn-end-unscored", f"the last token of a turn, {ids}:"
        remedy = "score the token that ends a turn, because the policy sampled it"
    elif only_rollout:
        cause, what, remedy = "action-unscored", f"tokens {ids} of an action:", "score all tokens that were sampled"
    elif not bool(a[:begin].any()):
        cause, what, remedy = "prompt-scored", f"tokens {ids} of the prompt:", "score only tokens that were sampled"
    else:
        cause, what = "observation-scored", f"tokens {ids} between turns:"
        remedy = "mask observations and tool results out of the loss, because the policy did not sample them"
    yield pair.finding(cause, begin, end, [f"{what} {left}", f"{what} {right}"], remedy)


def _ends_turns(batch: MultimodalBatch, token: int) -> bool:
    """Whether a sample ends in this token and scores it, so that turns end in it."""
    last = batch.cu_seqlens[1:].long() - 1
    return bool((batch.scored[last] & (batch.token_ids[last] == token)).any())


def _first_run(mask: Tensor) -> tuple[int, int]:
    """[begin, end) of the first run of True."""
    begin = int(torch.nonzero(mask)[0])
    rest = torch.nonzero(~mask[begin:])
    return begin, begin + int(rest[0]) if len(rest) else len(mask)


def _scope(rollout: MultimodalBatch, train: MultimodalBatch) -> tuple[list[str], list[str]]:
    """What both sides state, and what one of them does not."""
    axes = _axes(rollout, train)
    scored = bool(len(rollout.loss_spans) and len(train.loss_spans))
    known = _digests_known(rollout, train)
    fingerprints = None not in (rollout.processor_fingerprint, train.processor_fingerprint)
    parts = {
        "token ids": True,
        "media grids": True,
        "digests of pixels": known,
        "placeholder runs": True,
        f"positions ({', '.join(axes)})" if axes else "positions": bool(axes),
        "attention mask": True,
        "loss spans": scored,
        "processor settings": fingerprints,
    }
    return [name for name, there in parts.items() if there], [name for name, there in parts.items() if not there]
