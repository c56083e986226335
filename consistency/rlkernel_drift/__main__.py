"""`python -m rlkernel_drift`: the command of the same name."""

import sys

from rlkernel_drift.cli.main import main

sys.exit(main())
