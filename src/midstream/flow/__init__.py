"""The user's description of a flow: a graph of named operators, their schemas and functions. Runs nothing."""
