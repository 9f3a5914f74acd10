"""The server of the live page: what runs say of themselves, as JSON and as it happens, to whoever
has the key. Reads; never writes into a run, locks or steers it."""
