"""`python -m rlkernel_trl grpo --config x.yaml`: TRL's own command and parser, with this package's classes.

`trl grpo` runs its script in another process, which a patch in this one would not reach. For several processes use
`accelerate launch -m rlkernel_trl grpo --config x.yaml`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from rlkernel_trl import ALGORITHMS, patch


def main(argv: list[str] | None = None) -> int:
    """Runs the TRL script of a command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = [name.lower() for name in ALGORITHMS]
    if not arguments or arguments[0] not in commands:
        first = arguments[0] if arguments else ""
        usage = f"usage: python -m rlkernel_trl {{{','.join(commands)}}} [--config FILE] [options of TRL's command]"
        print(usage + (f"\nunknown command {first!r}" if first not in ("", "-h", "--help") else ""), file=sys.stderr)
        return 0 if first in ("-h", "--help") else 2
    command, *rest = arguments
    if "--config" in rest:
        given = rest[rest.index("--config") + 1 :][:1]
        if not given or not Path(given[0]).is_file():
            print(f"--config {' '.join(given)}: no such file; expected a YAML file of settings", file=sys.stderr)
            return 2
    patch()
    script = import_module(f"trl.scripts.{command}")
    parser = script.make_parser(prog=f"python -m rlkernel_trl {command}")
    parser.set_defaults(use_rl_kernel_backend=True)  # a configuration file or an option can set it to false
    *parsed, unknown = parser.parse_args_and_config(args=rest, return_remaining_strings=True)
    if unknown:
        names = ", ".join(word.removeprefix("--") for word in unknown if word.startswith("--")) or " ".join(unknown)
        print(
            f"unknown settings: {names}. TRL's {command} does not have them; accelerate's own options go before the "
            f"module: accelerate launch --num_processes 4 -m rlkernel_trl {command} ...",
            file=sys.stderr,
        )
        return 2
    script.main(*parsed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
