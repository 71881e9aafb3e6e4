"""Stock turnover: quotes and trades meet within a second, and give each stock's turnover rate."""
