"""The grammar: the stages of changes that a search tries, simple ones first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from rlkernel_drift.diagnose import attention, inputs, logits, records, settings, tensors
from rlkernel_drift.diagnose.context import Context
from rlkernel_drift.diagnose.location import Suspect, layer_count
from rlkernel_drift.diagnose.search import Change
from rlkernel_drift.gates.layers import layer_of

_CLOSELY = 8
"""Suspected tensors of which more changes are tried."""


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
    yield "operators and tensors", itertools.chain(settings.operators(context), tensors.edits(context))
    layers = list(dict.fromkeys(layer for s in suspects() if (layer := layer_of(s.name)) is not None))
    layers += [layer for layer in range(layer_count(context.model.model)) if layer not in layers]
    closely = [s.name for s in suspects() if "layer" not in s.name.rpartition(".")[2] and " " not in s.name][:_CLOSELY]
    for chosen in ((None, *layers[:2]), tuple(layers[2:])):
        words = "of the likeliest layers" if None in chosen else "of other layers"
        single = (settings.single_operators(context, chosen), tensors.single_edits(context, chosen, closely))
        yield f"operators and tensors {words}", itertools.chain(*single)
        if None in chosen:
            yield "spans of the prompts", inputs.spans(context)
