"""Sections of the report. Each is a function of the verdict that returns None where it has no content."""
