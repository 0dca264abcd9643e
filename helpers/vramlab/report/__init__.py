"""Where every byte was: what each witness returns, how witnesses are compared, and the errors they raise."""

__version__ = "0.1.0"
