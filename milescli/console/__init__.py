"""Prints all output: the only package that imports rich."""
