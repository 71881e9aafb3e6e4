"""What can be done to the tasks of a run while they run: the protocol, and one module for each operation."""
