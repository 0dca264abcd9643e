"""`measure`: the real training step here, in a fresh process; records of measurements."""
