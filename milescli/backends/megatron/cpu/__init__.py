"""Implementations of a layer's parts that are faster on a CPU: few passes over the memory, and
matrix products by oneDNN. Nothing here runs on an accelerator."""
