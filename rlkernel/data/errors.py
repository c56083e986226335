"""The error for a mistake in files, rewards or settings; the command line prints it without a traceback."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input; the message names the file and line or the setting, what was expected and what to do."""
