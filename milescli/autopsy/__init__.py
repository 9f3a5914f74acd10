"""Finds why a run ended, from the files that it left: see `why`."""
