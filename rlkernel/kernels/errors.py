"""Errors of building and choosing kernels; importable without torch, so that the command line can catch them."""

from __future__ import annotations


class BuildError(RuntimeError):
    """The C++ sources did not build or load; the message says why, where the log is and what to do."""


class NoCompilerError(BuildError):
    """There is no C++ compiler on this machine: the only build error after which the reference runs instead."""


class LaunchError(RuntimeError):
    """A kernel could not be loaded or launched, or a library call failed; the message has the status."""


class VariantError(ValueError):
    """A named variant of an order cannot run: its library is missing, does not support the input, or was refused."""
