"""Runs code that a model wrote, with limits and isolated from the machine (docs/sandbox.md). The
user's own code does not run here (`workers.worker`). Called by rewards and agents."""
