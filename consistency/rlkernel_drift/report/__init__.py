"""The report of a verdict for people: one HTML file that needs nothing else, and a picture for an issue."""

from rlkernel_drift.report.page import write_html

__all__ = ["write_html"]
