"""Workloads: seeded generators of the streams that experiments, tests and examples run on."""
