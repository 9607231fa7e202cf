"""hangguard."""
