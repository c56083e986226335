"""The commands of `rlkernel`: train, generate, data, fetch, doctor. Heavy imports happen inside a command's run()."""
