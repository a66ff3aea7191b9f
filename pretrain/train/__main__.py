"""One unsupervised attempt at a run: the entry of the launcher.

usage: deepspeed [--hostfile FILE] --module pretrain.train RECIPE [key=value ...]
       [--from=[RUN@]STEP]

`zeroclap supervise` does the same, and rolls back from loss spikes. RECIPE is a YAML file
or a name from pretrain/recipes; key=value changes a setting, such as optimizer.learning_rate=1e-4
or folder=runs/a. --from is that of `supervise`.

example: deepspeed --num_gpus 8 --module pretrain.train pile-base folder=runs/a
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data_prep.common import console
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from pretrain.config.load import load
from pretrain.records import control, failures
from pretrain.records.collective import Failure
from pretrain.records.segments import Source
from pretrain.train.attempt import Attempt, NotLoaded
from pretrain.train.setup import prepare

_FROM = "--from="
_SECONDS_TO_BE_ENDED = 3.0
"""The deepspeed launcher checks its ranks once a second."""


@console.survive_broken_pipe(is_result=False)
def main(arguments: Sequence[str]) -> int:
    """Train until the run is done or has spiked, and leave the group; returns the exit code."""
    arguments = [word for word in arguments if not word.startswith("--local_rank")]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(__doc__)
        return EXIT_DONE if arguments else EXIT_USAGE
    code = attempt(arguments)
    if code not in (EXIT_FAILED, EXIT_USAGE):  # after an error others may be in a collective
        from pretrain.engine.distributed import leave

        leave()
    return code


def attempt(arguments: Sequence[str]) -> int:
    """Train until the run is done or has spiked; returns the exit code."""
    from pretrain.engine import workarounds
    from pretrain.engine.distributed import PortInUse, adopt_launcher

    run = Path(arguments[0]).parent  # the supervisor puts its copy of the recipe there
    local_rank, code = 0, EXIT_USAGE
    # A rank that hangs is ended by a SIGTERM: its log shows where it was.
    faulthandler.register(signal.SIGTERM, file=2, all_threads=False, chain=True)
    expected: tuple[type[Exception], ...] = (ValueError, Failure)
    try:
        adopt_launcher(os.environ)
        local_rank = int(os.environ["LOCAL_RANK"])
        workarounds.import_without_compiler()
        sources = [word for word in arguments if word.startswith(_FROM)]
        if len(sources) > 1:
            raise ValueError(f"--from: given twice ({', '.join(sources)})")
        config = load(arguments[0], [word for word in arguments[1:] if word not in sources])
        run = Path(config.folder)
        source = Source.parse(sources[0].removeprefix(_FROM)) if sources else None
        setup = prepare(config, source, int(os.environ["WORLD_SIZE"]))
        code, expected = EXIT_FAILED, (NotLoaded, Failure)
        return Attempt(setup).run() if setup else EXIT_DONE
    except expected as error:
        # A supervisor chose the port and will choose another one.
        is_retried = isinstance(error, PortInUse) and control.token_of(os.environ)
        return _fail(run, error, EXIT_FAILED if is_retried else code, local_rank)
    except Exception as error:
        failures.report(run, EXIT_FAILED, error, unexpected=True)
        raise


def _fail(run: Path, error: Exception, code: int, local_rank: int) -> int:
    """Report an error to the supervisor and the console; returns the exit code."""
    failures.report(run, code, error)
    if not local_rank:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            sys.stderr.write(f"pretrain.train: error: {error}\n")
    elif not isinstance(error, Failure):  # a Failure is every rank's
        # Most other errors occur on every rank, and one message per machine is enough: the launcher
        # ends the other ranks soon after the first has exited. If it does not, this error differs.
        time.sleep(_SECONDS_TO_BE_ENDED)
        sys.stderr.write(f"pretrain.train: error on rank {os.environ['RANK']}: {error}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
