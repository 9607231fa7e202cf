"""I/O out: one module per thing changed; each returns what it did."""
