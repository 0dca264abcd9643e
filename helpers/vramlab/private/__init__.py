"""Private parts of other libraries: nothing else here reaches names with an underscore of theirs.

There is a module for each library. *Private parts of libraries* in CONTRIBUTING.md says why no
public way serves, and which test fails when a release changes them. What is replaced, and not only
read, is given as a constant: the name for `replaced` of `patched.py`, for one thread.
"""
