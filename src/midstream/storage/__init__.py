"""Durable storage: atomic, synced writes, blobs by digest, checksums, ownership of folders."""
