"""The commands that read the folders of runs: status, diff and audit."""

import argparse
import sys
from pathlib import Path

from data_prep.common.files import strict_json


def add_status_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    command.add_argument("run", type=Path, help="the run's folder")
    json = (
        "print one JSON object: run, state (starting, training, stopped, spiked, given-up or "
        "finished), orphaned (true: it trains, and its supervisor is gone), step, steps, loss, "
        "tokens_per_second, eta_seconds, validation and best_validation (step, loss, perplexity), "
        "attempts, spikes, rollbacks, checkpoints (steps), suspected_since (step), code_changes "
        "(sentences), init_from (path, files, sha256), corpora (of each: name, blocks, epochs, "
        "share, skipped, share_of_tokens), segments (of each: steps, why, recipe, seed, changes), "
        "segment (of the next step: name, first_step, end_step), slow_rank (rank, host, seconds, "
        "others_seconds), reason, log, next (a command); null where there is none"
    )
    chosen = command.add_mutually_exclusive_group()
    chosen.add_argument("--json", action="store_true", help=json)
    report = (
        "write report.md, loss.png and loss.svg into the folder, and print the report's path; "
        "supervise does so when it ends"
    )
    chosen.add_argument("--report", action="store_true", help=report)


def status(options: argparse.Namespace) -> None:
    """Show what happened to a run and what it is doing now.

    example: zeroclap status runs/base
    """
    from pretrain.records.report import write_report
    from pretrain.records.status import describe_run, facts, view

    if options.report:
        sys.stdout.write(f"{write_report(options.run)}\n")
        return
    seen = view(options.run)
    sys.stdout.write(f"{strict_json(facts(seen))}\n" if options.json else describe_run(seen))


def add_diff_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `diff`."""
    command.add_argument("runs", type=Path, nargs=2, metavar="run", help="the runs' folders")


def diff(options: argparse.Namespace) -> None:
    """Show what differs between two runs: settings, data, environment and losses.

    example: zeroclap diff runs/base runs/zero-clap
    """
    from pretrain.records.diff import describe_differences

    sys.stdout.write(describe_differences(*options.runs))


def add_audit_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit`."""
    command.add_argument("run", type=Path, help="the run's folder")
    content = (
        "read the corpora too, and compare every file and table of blocks with what the run began "
        "with; about a second a GB"
    )
    command.add_argument("--content", action="store_true", help=content)


def audit(options: argparse.Namespace) -> int:
    """Check from a run's records that every block was read once an epoch.

    The ledger says which blocks each step must have read; metrics.jsonl has the hash of those that
    it did read. `--content` also checks that the blocks are the corpus's. If all records were
    rewritten together, no audit shows it.

    example: zeroclap audit runs/base
    """
    from pretrain.records.audit import audit as audit_run
    from pretrain.records.audit import write_findings

    return write_findings(audit_run(options.run, content=options.content), sys.stdout.write)


COMMANDS = {
    "status": (add_status_arguments, status),
    "diff": (add_diff_arguments, diff),
    "audit": (add_audit_arguments, audit),
}
