"""Scoring with a reference model (transformers, CPU or GPU): the trainer's side again, under variations."""
