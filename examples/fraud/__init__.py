"""Payment fraud detection on a live stream: two models, two exchanges, one verdict. Start reading in ``flow.py``."""
