"""The numbers of NEXMark that queries and oracle must agree on, and nothing else."""

from __future__ import annotations

DELAY_S = 1
"""How much later than others an event may arrive."""

EUROS_PER_DOLLAR = 0.908
"""q1."""

AUCTION_MODULUS = 123
"""q2 looks at auctions whose number is a multiple of this."""

STATES = ("OR", "ID", "CA")
CATEGORY = 10
RETENTION_S = 60
"""q3 suggests an auction of this category to whoever watches these states; seller and auction at most so far apart."""

HOT_WINDOW_S, HOT_EVERY_S = 10, 2
"""q5."""

LAST_SALES = 10
"""Number of sales of a seller that q6 averages."""

WINDOW_S = 10
"""q7 and q8."""
