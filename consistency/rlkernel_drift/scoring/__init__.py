"""Re-scoring with a reference model (transformers, CPU or GPU): the trainer's forward and variations of it."""
