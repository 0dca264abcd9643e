"""What people touch: the command line, notebooks, figures, the calculator."""
