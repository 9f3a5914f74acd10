"""The life of a conversion between a Hugging Face folder and a `torch_dist` checkpoint: what its
source is, one driver for both directions, the proof, the report. `checkpoint` says which bytes go
where."""
