"""A real broker on this machine: for the example beside this file, for the tests, and for ``benchmarks.kafka``."""
