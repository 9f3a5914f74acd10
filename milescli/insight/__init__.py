"""What a run's own files say: metrics as columns, samples, where its time went, and the verdict.
Reads; never writes, locks or steers, and knows no engine and no rank."""
