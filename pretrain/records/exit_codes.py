"""Exit codes of every process: commands, ranks, the supervisor and its agents."""

from data_prep.common.arguments import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

__all__ = [
    "EXIT_DONE",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_PREEMPTED",
    "EXIT_SPIKE",
    "EXIT_UNPROVED",
    "EXIT_USAGE",
]

EXIT_UNPROVED = 3
"""An audit found no problem, but a record that would prove the run sound is missing."""
EXIT_SPIKE = 75
"""The attempt stopped at a confirmed loss spike; the ledger holds it, `supervise` rolls back."""
EXIT_PREEMPTED = 76
"""Stopped on request after saving; the same command continues the run."""
