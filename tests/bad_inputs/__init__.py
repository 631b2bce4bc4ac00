"""Bad inputs, kept: command lines and calls of public functions that must be answered with one sentence."""
