"""A streaming ledger: deposits, and transfers that are made whole or not at all. Start reading in ``flow.py``."""
