"""Benchmarks: ``python -m benchmarks.NAME [--quick]``. Each pairs a baseline with midstream in one run."""
