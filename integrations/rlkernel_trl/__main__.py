"""`python -m rlkernel_trl grpo --config x.yaml`: TRL's own command and parser, with this package's classes.

`trl grpo` starts another process for its script, which a patch in this one would not reach. For several processes:
`accelerate launch -m rlkernel_trl grpo --config x.yaml`.
"""

from __future__ import annotations

import sys
from importlib import import_module

from rlkernel_trl import ALGORITHMS, patch


def main(argv: list[str] | None = None) -> int:
    """Runs TRL's script of a command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = [name.lower() for name in ALGORITHMS]
    if not arguments or arguments[0] not in commands:
        asked = arguments[0] if arguments else ""
        wanted = f"usage: python -m rlkernel_trl {{{','.join(commands)}}} [--config FILE] [options of TRL's command]"
        print(wanted + (f"\nunknown command {asked!r}" if asked not in ("", "-h", "--help") else ""), file=sys.stderr)
        return 0 if asked in ("-h", "--help") else 2
    command, *rest = arguments
    patch()
    script = import_module(f"trl.scripts.{command}")
    parser = script.make_parser(prog=f"python -m rlkernel_trl {command}")
    parser.set_defaults(use_rl_kernel_backend=True)  # a configuration file or an option may still say false
    script.main(*parser.parse_args_and_config(args=rest, fail_with_unknown_args=False)[:4])
    return 0


if __name__ == "__main__":
    sys.exit(main())
