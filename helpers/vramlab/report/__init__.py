"""Where every byte was: what each witness returns, how witnesses are compared, and the errors they raise."""
