"""Durable bytes: atomic writes and their syncing, blobs by digest, checksums, who owns a folder."""
