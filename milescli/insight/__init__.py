"""What a run's own files say: its figures as columns, its samples, where its time went, and the
verdict. Reads; never writes, locks or steers, and knows no engine and no rank."""
