"""How rows of two streams find each other."""
