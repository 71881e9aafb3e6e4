"""Coordinator and tasks: the messages, the state machine that decides, and the channel that carries."""
