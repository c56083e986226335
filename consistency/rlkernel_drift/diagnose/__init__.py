"""The grammar: the stages of changes that a search tries, simple ones first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from rlkernel_drift.diagnose import attention, inputs, logits, operators, records, settings, tensors
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.location import Suspect
from rlkernel_drift.diagnose.trials import Change

_CLOSELY = 8
"""Suspected tensors of which more changes are tried."""
_OUTSIDE = ("embedding", "lm_head", "final_norm")


def stages(context: Context, suspects: Callable[[], list[Suspect]]) -> Iterator[tuple[str, Iterable[Change]]]:
    """The grammar, simple changes first; single operators and tensors in the order of the layers' suspicion."""
    yield "records", records.records(context)
    yield "logits", (c for c in logits.processing(context) if c.stage == "logits")
    yield "precision", logits.precision(context)
    yield "versions", tensors.versions(context)
    yield "inputs", itertools.chain(inputs.inputs(context), attention.hidden_keys())
    yield "configuration", settings.configuration(context)
    yield "attention", attention.attention(context)
    yield "filters", (c for c in logits.processing(context) if c.stage == "filters")
    yield "operators and tensors", itertools.chain(operators.operators(context), tensors.edits(context))
    yield "single operators and tensors", itertools.chain(operators.single(context), tensors.single(context))
    suspected = [s.name for s in suspects()]
    closely = [name for name in suspected if len(name.split(".")) == 3 or name in _OUTSIDE][:_CLOSELY]
    yield "spans of the prompts", inputs.spans(context)
    yield (
        "suspected operators and tensors",
        itertools.chain(operators.closely(context, closely), tensors.closely(context, closely)),
    )
