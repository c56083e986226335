"""Errors of strict mode, the same in every trainer's integration."""

from rlkernel_transformers.comparison import ExactnessLostError, MismatchError

__all__ = ["ExactnessLostError", "MismatchError"]
