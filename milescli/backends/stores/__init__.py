"""Object stores (S3 and its like) through fsspec: checkpoints copied and fetched, exports uploaded.
The only place that imports fsspec."""
