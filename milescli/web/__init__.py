"""Serves the live page: reports of runs, as JSON and as they happen, to clients that have the key.
Only reads; never writes into a run, locks or steers it."""
