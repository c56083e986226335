"""The commands of `rlkernel`, listed in main.py. Heavy imports happen inside a command's run()."""
