"""The lab: a local page on which positions become visible. Needs the extra `lab`; only `phasor lab` imports it."""
