"""Planted faults: tiny models, an engine that can be wrong in known ways, and the kinds of faults."""
