"""The pages that a run leaves: its report, and the comparison of several runs."""
