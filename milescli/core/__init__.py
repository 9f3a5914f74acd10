"""Types that all packages share: errors, data types, events, the registry of plug-ins, units.
Standard library only."""
