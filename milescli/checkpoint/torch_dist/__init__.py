"""`torch_dist` checkpoints, as Megatron-Core 0.16 writes and loads them, without Megatron: keys,
files, metadata, reader and writer."""
