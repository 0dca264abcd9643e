"""`plan`: which recipes fit a GPU, how fast each is, and what would have to give."""
