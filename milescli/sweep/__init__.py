"""Searches hyper-parameters of a recipe: trials are ordinary runs, which a searcher proposes and a
scheduler judges by their held-out accuracy."""
