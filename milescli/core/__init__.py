"""The dictionary of the house: errors, types, events, registry, units. Standard library only."""
