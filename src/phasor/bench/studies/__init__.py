"""The studies of `phasor bench`, a module each: its settings, and `run`."""
