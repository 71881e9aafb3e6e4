"""Complete programs that use midstream. Run them from the project's root: ``python -m examples.fraud``."""
