"""A model directory as an input: the engine scores the other side's tokens; the result is a capsule like any other."""

from __future__ import annotations

from dataclasses import replace

from rlkernel_drift.errors import DriftError
from rlkernel_drift.inputs import Source


def scored(source: Source, other: Source, device: str = "cpu") -> Source:
    """The source with a capsule; other kinds of sources come back as they are.

    The engine runs in the dtype that the other side declares, at its sampling settings.

    Raises:
        DriftError: the other side has no tokens to score.
    """
    if source.model is None or source.capsule is not None:
        return source
    if other.capsule is None:
        raise DriftError(f"{source.label} is a model: the other side must have tokens, a capsule")
    from rlkernel_drift.capture.request import Request
    from rlkernel_drift.cli.capture import capture

    manifest = other.capsule.manifest
    request = Request(
        model=source.model.path,
        tokens=other.capsule,
        side="train",
        sampling=manifest.sampling,
        dtype=str(manifest.config.get("dtype", "float32")),
        device=device,
    )
    return replace(source, capsule=capture(source.model.engine, request))
