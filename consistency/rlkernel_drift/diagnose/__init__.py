"""The grammar: the changes that a search tries, in stages, simple ones first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from rlkernel_drift.diagnose import attention, inputs, logits, operators, records, settings, tensors
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.location import Suspect
from rlkernel_drift.diagnose.search import Stage
from rlkernel_drift.diagnose.trials import Change

_CLOSELY = 8
"""Suspected operators of which more changes are tried."""
_OUTSIDE_LAYERS = ("embedding", "lm_head", "final_norm")


def stages(context: Context, suspects: Callable[[], list[Suspect]]) -> list[Stage]:
    """The grammar, simple changes first; each stage makes its changes when it is called."""

    def suspected() -> Iterator[Change]:
        names = [s.name for s in suspects() if s.weights]
        closely = [name for name in names if len(name.split(".")) == 3 or name in _OUTSIDE_LAYERS][:_CLOSELY]
        return itertools.chain(operators.closely(context, closely), tensors.closely(context, closely))

    chain = itertools.chain
    return [
        ("records", lambda: records.records(context)),
        ("logits", lambda: logits.processing(context)),
        ("precision", lambda: logits.precision(context)),
        ("versions", lambda: tensors.versions(context)),
        ("inputs", lambda: chain(inputs.inputs(context), attention.hidden_keys())),
        ("configuration", lambda: settings.configuration(context)),
        ("attention", lambda: attention.attention(context)),
        ("filters", lambda: logits.filters(context)),
        ("operators and tensors", lambda: chain(operators.operators(context), tensors.edits(context))),
        ("single operators and tensors", lambda: chain(operators.single(context), tensors.single(context))),
        ("spans of the prompts", lambda: inputs.spans(context)),
        ("suspected operators and tensors", suspected),
    ]
