"""Names the cause of a drift by re-scoring one side under a battery of hypotheses."""
