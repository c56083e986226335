"""The ladder of gates, in the order of `common.TITLES`."""
