"""Sections of the report, one file each: a function of the verdict, None where there is nothing to say."""
