"""The course's own code: exercises, claims and their experiments, and teaching code of single
chapters.
"""
