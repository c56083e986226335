"""Compares the layout of two files of records, with `rlkernel.multimodal`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlkernel_drift.errors import DriftError
from rlkernel_drift.knowledge import finding
from rlkernel_drift.verdict import Finding

if TYPE_CHECKING:
    from rlkernel.multimodal import Layout


def compare_layout_files(rollout: Path, train: Path) -> Layout:
    """The comparison of two files, or of the layout.jsonl of two folders.

    Raises:
        DriftError: a file cannot be read, or no sample can be matched.
    """
    from rlkernel.multimodal import compare_layout, read_records  # imports torch, which other comparisons do not need

    sides = (path / "layout.jsonl" if path.is_dir() else path for path in (rollout, train))
    try:
        return compare_layout(*map(read_records, sides))
    except (OSError, ValueError) as error:
        raise DriftError(str(error)) from None


def layout_findings(rollout: Path | None, train: Path | None) -> list[Finding]:
    """The differences for a verdict; without any, a note on what was compared. Empty if a side has no layout.

    Raises:
        DriftError: as `compare_layout_files`.
    """
    if rollout is None or train is None:
        return []
    layout = compare_layout_files(rollout, train)
    if not layout.findings:
        words = f"the layout of {layout.samples} samples is equal: {', '.join(layout.compared)}"
        return [finding("layout", words, "note", unknown=[*layout.unknown])]
    return [
        finding("layout", str(f), difference=f.cause, sample=f.sample, samples=f.samples, token=f.begin)
        for f in layout.findings
    ]
