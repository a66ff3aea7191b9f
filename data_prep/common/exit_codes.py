"""Exit codes of every process: commands, ranks, the supervisor and its agents."""

EXIT_DONE = 0
EXIT_FAILED = 1
"""The work was tried and did not succeed, or a check found a problem."""
EXIT_USAGE = 2
"""The command line, or a file that it names, cannot be used."""
EXIT_UNCHECKED = 3
"""An audit found no problem, but a record that is needed to check the run is missing."""
EXIT_SPIKE = 75
"""The attempt stopped at a confirmed loss spike; the ledger holds it, `supervise` rolls back."""
EXIT_PREEMPTED = 76
"""Stopped on request after saving; the same command continues the run."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C."""
