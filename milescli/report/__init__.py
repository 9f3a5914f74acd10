"""Writes a run, or a comparison of two, as one file for other people: HTML or Markdown. Only reads
files, and starts nothing; called by `miles report`."""
