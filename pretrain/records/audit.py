"""Say whether a run's folder is sound: `zeroclap audit RUN`.

`proof` compares the run's records with each other; this module compares them with the files that
they name. Both name blocks by number. That a number stands for the same text is checked at each
start (see `folder.check_corpora`); `compare_contents` reads the corpora and checks it in full.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep import contents
from data_prep.common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_UNCHECKED
from data_prep.common.files import sha256_of
from data_prep.common.wording import count
from data_prep.manifest import SPLITS, load_manifest
from pretrain.config.run import BlockSource, Segments
from pretrain.data.mixture import Mixture
from pretrain.data.sources import algorithms, open_source
from pretrain.records import checkpoints, folder, ledger, metrics
from pretrain.records.proof import Audit, examine
from pretrain.records.segments import corpora_of, lines, order_of, recipes_of


def audit(run: Path, *, content: bool = False) -> Audit:
    """Examine a run's folder.

    Args:
        run: the folder.
        content: read the corpora too, about a second a GB.

    Raises:
        ValueError: it has no ledger, or a line of the ledger does not verify; the line is named.
    """
    records = ledger.read_ledger(run / ledger.FILE_NAME)
    if not records:
        raise folder.not_a_run(run, ledger.FILE_NAME)
    left_out = list[str]()
    found = examine(records, metrics.read_metrics(run / metrics.METRICS, left_out.append))
    found.noted += left_out
    found.limits.append(
        "these are the run's own records; if all of them were rewritten together, no audit shows it"
    )
    segments = _compare_recipes(run, records, found)
    _compare_with_disk(run, records, found)
    _compare_initial_weights(run, records, found)
    if content and segments:
        compare_contents(segments, records, found)
    elif not content:
        found.limits.append(
            "the corpora: blocks are compared by number. Each start compared the corpora's files "
            "with their manifests, by size, time and bytes at some places; --content reads them all"
        )
    return found


def compare_contents(segments: Segments, records: Sequence[ledger.Record], found: Audit) -> None:
    """Check that the numbers of blocks still stand for the text that the run began with.

    Args:
        segments: of the run.
        records: of the ledger.
        found: the findings are added to it.
    """
    corpora, sources = corpora_of(records), segments.sources
    digests: dict[str, str] = {}  # by path: a corpus may be cut in several ways
    for source, corpus, cut in zip(sources, corpora, algorithms(sources), strict=True):
        digests[source.path] = corpus["digest"]
        if corpus["cut"] != cut:
            cuts = f"was cut by {corpus['cut']}; this version cuts by {cut}"
            found.unchecked.append(f"{source.path}: {cuts}")
    for path, digest in digests.items():
        own = [source for source in sources if source.path == path]
        if problems := _content_problems(Path(path), digest, own):
            found.problems += problems
        else:
            right = "every file is as its manifest says, and gives the blocks that training reads"
            found.checked.append(f"{path}: {right}")


def _content_problems(corpus: Path, digest: str, sources: Sequence[BlockSource]) -> list[str]:
    try:
        manifest = load_manifest(corpus)
        if manifest.digest() != digest:
            return [f"{corpus}: is not the corpus that the run began with"]
        if problems := list(contents.differences(corpus, manifest)):
            return problems
        for source, split in itertools.product(sources, SPLITS):
            open_source(source, split).check_tables()
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"{corpus}: {error}"]
    return []


def _compare_recipes(run: Path, records: Sequence[ledger.Record], found: Audit) -> Segments | None:
    """Check that the run's recipes lead to the batches and weights that the ledger has.

    Returns:
        The run's segments; None if it has not begun, or its recipes cannot be read.
    """
    if ledger.created(records) is None:
        return None
    try:
        segments = Segments.of(recipes_of(run, records))
    except ValueError as error:
        found.problems.append(str(error))
        return None
    found.segments += lines(segments, ledger.run_state(records))
    order, sizes = order_of(records)
    if (order.mixture, sizes) == (Mixture.of_run(segments), segments.sizes):
        found.checked.append("the recipes give the batch sizes and corpus weights of the ledger")
    else:
        found.problems.append("the recipes give other batches or weights than the ledger has")
    return segments


def _compare_with_disk(run: Path, records: Sequence[ledger.Record], found: Audit) -> None:
    """Check that the checkpoints the ledger counts on are on disk as they were committed."""
    state, on_disk = ledger.run_state(records), list[int]()
    for step in state.checkpoints:
        checkpoint = checkpoints.folder_of(run, step)
        if state.finished_steps and not checkpoint.exists():
            found.noted.append(
                f"{checkpoint}: was deleted since the run's end, by something other than zeroclap; "
                "the blocks that were read are checked without it"
            )
            continue
        on_disk.append(step)
        try:
            checkpoints.read_manifest(checkpoint, state.manifests[step])
        except (OSError, ValueError) as error:
            found.problems.append(f"checkpoint of step {step}: {error}")
    if on_disk and not found.problems:
        found.checked.append(
            f"{count(len(on_disk), 'checkpoint')} on disk, each as it was committed: steps "
            + ", ".join(map(str, on_disk))
        )


def _compare_initial_weights(run: Path, records: Sequence[ledger.Record], found: Audit) -> None:
    """Check that a run that continues another model still has the weights it began with."""
    origin = ledger.origin(records)
    if origin is None:
        return
    path = run / folder.INITIAL_WEIGHTS
    try:
        is_same = path.is_file() and sha256_of(path) == origin["sha256"]
    except OSError as error:
        found.problems.append(f"{path}: {error.strerror or error}")
        return
    if is_same:
        found.checked.append(f"initial weights: {ledger.describe_origin(origin)}")
    else:
        found.problems.append(f"{path}: is missing, or is not what the run began with")


def write_findings(found: Audit, write: Callable[[str], object]) -> int:
    """Write the findings and return the exit code."""
    marked = {
        "checked": found.checked,
        "UNCHECKED": found.unchecked,
        "PROBLEM": found.problems,
        "note": found.noted,
        "limit": found.limits,
    }
    for line in found.segments:
        write(f"{line}\n")
    for mark, sentences in marked.items():
        for sentence in sentences:
            write(f"{mark:9} {sentence}\n")
    if found.problems:
        verdict, code = "not sound", EXIT_FAILED
    elif found.unchecked:
        verdict, code = "incomplete", EXIT_UNCHECKED
    else:
        verdict, code = "sound", EXIT_DONE
    write(f"{verdict}\n")
    return code
