"""Errors of strict mode, the same in every trainer's integration."""

from rlkernel.contract import MismatchError
from rlkernel_transformers.comparison import ExactnessLostError

__all__ = ["ExactnessLostError", "MismatchError"]
