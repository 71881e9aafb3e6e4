"""The edge towards a runtime in this process, with seeds and faults, for tests and simulation."""
