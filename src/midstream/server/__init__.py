"""Access to a running job from other processes: a small HTTP interface on the loopback address, and its client."""
