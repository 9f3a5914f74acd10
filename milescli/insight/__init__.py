"""Reads a run's own files: metrics as columns, samples, where its time went, and the verdict. Never
writes, locks or steers, and knows no engine and no rank."""
