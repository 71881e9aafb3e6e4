"""What a user describes: the graph of named operators, their schemas and functions. Runs nothing."""
