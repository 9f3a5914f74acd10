"""How we speak: the only room that imports rich."""
