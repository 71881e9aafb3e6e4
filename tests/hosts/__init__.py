"""Several hosts on this machine, joined by a network that tests can break, and a cluster of Spark on them."""
