"""One module per operator: its description, its rules, its step in a task, its state, and the method that adds it.

:mod:`.stream` puts the methods together into ``Stream`` and ``KeyedStream``, and so lists all operators.
:mod:`.builder` has ``Flow``, with which a user begins.
"""
