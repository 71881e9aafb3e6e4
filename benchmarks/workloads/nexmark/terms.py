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

SESSION_GAP_S = 2
"""q11: a pause of this length ends a session."""

SIDE_ROWS = 10_000
"""q13: rows of the table."""

FROM_PRICE, TO_PRICE = 1_000_000, 50_000_000
LETTER = "e"
"""q14."""

LOW_PRICE, HIGH_PRICE = 10_000, 1_000_000
"""q17: bounds of the ranges of prices."""

TOP = 10
"""q19."""

CHANNELS = {"web": 0, "app": 1, "phone": 2}
"""q21: the well-known ones."""
