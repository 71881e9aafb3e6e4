"""SMQ, after Bartnik et al.: numbers → a counter for each of eighty instances → a sink. What changes is its plan."""

from benchmarks.workloads.smq.flow import BASE, Change, Plan, flow, numbers
from benchmarks.workloads.smq.oracle import Seam, Verdict, verdict

__all__ = ["BASE", "Change", "Plan", "Seam", "Verdict", "flow", "numbers", "verdict"]
