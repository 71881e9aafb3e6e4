"""The local runtime, in this process, with seeds and faults, for tests and simulation."""
