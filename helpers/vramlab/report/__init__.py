"""Where every byte was: what each witness returns, how they are compared, and their errors."""

__version__ = "0.1.0"
