"""Sections of the report: each a function of the verdict, None where there is nothing to say."""
