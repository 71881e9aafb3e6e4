"""Changes of a running job, for both runtimes: preparation, preflight, trial, history, restart and revert."""
