"""The command line; a command imports what it runs on when it runs."""
