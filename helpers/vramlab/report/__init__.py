"""Where every byte was: what each witness returns and how reports are compared."""
