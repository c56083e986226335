"""The command line. Commands import numpy, torch and engines when they run, so that `--help` is fast."""
