"""Environments of other packages whose requirements clash with ours: each package lives in a
virtual environment of its own, and is spoken to over the pipes of a process."""
