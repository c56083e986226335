"""Its place puts `tests/` on the import path, so that every test can say `from oracle.hopper_mma import ...`."""
