"""The course's own code.

That is exercises, claims and their experiments, and teaching code of single chapters.
"""
