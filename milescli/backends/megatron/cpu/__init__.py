"""Forms of a layer's parts that a CPU computes faster: few passes over the memory, and matrix
products by oneDNN. Nothing here runs on an accelerator."""
