"""`python -m rlkernel` is the command `rlkernel`, for launchers of several processes such as `torchrun -m rlkernel`."""

import sys

from rlkernel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
