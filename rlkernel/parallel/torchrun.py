"""Whether this process is a rank. Without torch, so that settings can be resolved before it is imported."""

from __future__ import annotations

import os


def is_launched() -> bool:
    """Whether torchrun, or another launcher with its variables, has started this process as one of several ranks."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))
