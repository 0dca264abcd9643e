"""What everything else stands on: errors, files, paths, versions and text."""

__version__ = "0.1.0"
