"""Gate 7: where does it begin? Bit for bit where the profile asks for bits, else the accumulated errors as evidence."""

from __future__ import annotations

from rlkernel_drift.gates.common import gate, skipped, some
from rlkernel_drift.knowledge import finding
from rlkernel_drift.locate.accumulated import accumulated_view, repeated_operators
from rlkernel_drift.locate.bitwise import describe, first_divergence
from rlkernel_drift.locate.rows import common_rows
from rlkernel_drift.pair import Pair
from rlkernel_drift.verdict import Gate, LayerView


def layers_gate(pair: Pair, bitwise: bool) -> tuple[Gate, LayerView | None]:
    """Compares recorded operators; fails on a differing bit under a bitwise profile."""
    rows = common_rows(pair)
    if rows is None:
        return skipped("layers", "no operator was recorded on both sides for the same tokens"), None
    repeated = repeated_operators(pair)
    if repeated:
        message = f"{some(repeated)} repeat the layer before bit for bit: one buffer was recorded, not the layers"
        return gate("layers", [finding("nothing-compared", message, "warning")], ""), None
    view = accumulated_view(pair, rows)
    view.first = first_divergence(pair, rows)
    if view.first is None:
        return gate("layers", [], f"{len(rows.operators)} operators of {len(rows.token)} tokens have equal bits"), view
    message = describe(view.first)
    if bitwise:
        return gate("layers", [finding("operator", message, operator=view.first.operator)], ""), view
    words = f"{message}; with rounding on both sides this says little, `diagnose --model` replays the layers"
    return gate("layers", [finding("operator", words, "note", operator=view.first.operator)], words), view
