"""Real kills on Spark: processes of running jobs die at random moments, and the results must still be exact."""
