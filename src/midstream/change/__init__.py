"""Changes of a running job: prepared, enacted, tried, kept on record; what both runtimes share of them."""
