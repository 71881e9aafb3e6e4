"""What can be done to the tasks of a run while they run. Each operation is one module."""
