"""Faults at random moments of real runs: `make chaos`. The table is in `faults`, what must hold
afterwards in `oracle`."""
