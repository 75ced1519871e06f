"""One optimizer step as one compiled program."""
