"""Converts between a Hugging Face folder and a `torch_dist` checkpoint: finds the source, runs
either direction, proves and reports the result. `checkpoint` decides which bytes go where."""
