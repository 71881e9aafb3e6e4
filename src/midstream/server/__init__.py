"""A running job from outside its process: a small HTTP interface on the loopback address, and its client."""
