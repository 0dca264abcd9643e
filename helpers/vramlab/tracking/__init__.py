"""Follows every storage of a training step from birth to free, and knows what it is for."""
