"""What engine and state share: rows, schemas, hashes of keys, and the times of an epoch."""
