"""First divergence: by bits, by replaying layers on recorded inputs, by splicing."""
