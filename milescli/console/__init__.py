"""All output: the only room that imports rich."""
