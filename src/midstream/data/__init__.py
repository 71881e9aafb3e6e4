"""What engine and state are both made of: rows, hashes of keys, files, and the times of an epoch."""
