"""The tests of `rlkernel_verl` run in an environment of their own: `make test-verl`."""

import importlib.util
import os
import sys

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

if not collect_ignore_glob:
    from verl_side import ENVIRONMENT

    os.environ.update(ENVIRONMENT)  # before the first import of verl
    sys.path[:0] = ENVIRONMENT["PYTHONPATH"].split(os.pathsep)
