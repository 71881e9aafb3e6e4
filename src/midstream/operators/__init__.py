"""One module per operator: its description, its rules, its step in a task, its state, and the method that adds it.

:mod:`.stream` combines the methods in ``Stream`` and ``KeyedStream``, whose bases list all operators. :mod:`.builder`
has ``Flow``, where a user begins.
"""
