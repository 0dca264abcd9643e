"""What people touch: the command line, notebooks, figures."""
