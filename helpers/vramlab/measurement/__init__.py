"""`measure`: the real training step on this machine, in a fresh process; records of measurements."""
