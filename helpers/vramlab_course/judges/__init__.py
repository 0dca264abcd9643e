"""Judges of readers' pieces: what the conditions of exercises and blanks call."""
