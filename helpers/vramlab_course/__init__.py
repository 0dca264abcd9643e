"""What belongs to the course alone: exercises, claims and their experiments, and the teaching code of single chapters."""
