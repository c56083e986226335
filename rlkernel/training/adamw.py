"""Deprecated: the optimizer is `rlkernel.optim.AdamW`."""

from rlkernel.optim import AdamW as AdamW
