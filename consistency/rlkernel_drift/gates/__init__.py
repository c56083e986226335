"""The ladder of gates, one file each, in the order of `common.TITLES`."""
