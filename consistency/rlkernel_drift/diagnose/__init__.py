"""Diagnosis: a battery of hypotheses, each scored against one side's log-probabilities; see docs/drift/diagnose.md."""
