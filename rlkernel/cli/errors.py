"""The error that a command raises for a user's mistake; printed as one line without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Bad input from the user; the message names the input, what was expected and what to do."""
