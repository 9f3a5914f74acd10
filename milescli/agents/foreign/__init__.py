"""Runs environments of other packages whose requirements conflict with ours: each package is in a
virtual environment of its own, and is called over the pipes of a process."""
