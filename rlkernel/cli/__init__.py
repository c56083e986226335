"""The command line: `rlkernel train | generate | bench | doctor`. Heavy imports happen inside a command's run()."""
