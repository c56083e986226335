"""Detection power: every kind of fault on every family and seed, and healthy pairs; what was named, what was missed."""
