"""Where code that a model wrote is run: bounded, and shut off from the machine (docs/sandbox.md).
Code of the user's own does not come here (`workers.worker`). Called by rewards and agents."""
