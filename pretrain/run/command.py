"""The commands that read a run's folder: status, audit and report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_run(command: argparse.ArgumentParser) -> None:
    """Add the argument of `status`, `audit` and `report`."""
    command.add_argument("run", type=Path, help="the run's folder")


def status(options: argparse.Namespace) -> None:
    """Show what happened to a run and what it is doing now.

    example: python -m pretrain status runs/base
    """
    from pretrain.run.status import describe_run

    sys.stdout.write(describe_run(options.run))


def audit(options: argparse.Namespace) -> int:
    """Prove from a run's ledger that every block was read once an epoch.

    example: python -m pretrain audit runs/base
    """
    from pretrain.run.audit import audit as audit_run
    from pretrain.run.audit import write_findings

    return write_findings(audit_run(options.run), sys.stdout.write)


def report(options: argparse.Namespace) -> None:
    """Write a run's report.md and loss.png; supervise does so when it ends.

    example: python -m pretrain report runs/base
    """
    from pretrain.run.report import write_report

    sys.stdout.write(f"{write_report(options.run)}\n")
