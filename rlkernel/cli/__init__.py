"""The command line: `rlkernel train | generate | doctor`. Heavy imports happen inside a command's run()."""
