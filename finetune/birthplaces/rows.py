"""The task's data: a text, and questions with answers.

The text has a document a line; it gives the character vocabulary and the corpus of pretraining.
Questions and answers are TSV files and rows of ids `<s> question <mask> answer <mask>`. The model
predicts the first `<mask>`, the answer and the closing `<mask>`.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.common.files import alone_in, write_atomically
from data_prep.documents import Reject, read_documents
from data_prep.tokenizer import FILE_NAME, Tokenizer, train_characters
from finetune.batches import ShuffledBatches
from pretrain.loop.protocols import MicroBatch
from pretrain.objectives.base import Block, Ids, Key
from pretrain.objectives.causal import CausalLMConfig
from pretrain.objectives.tokens import DocumentObjective


def documents(path: Path) -> list[str]:
    """Read the lines of a text file that are not blank.

    Raises:
        ValueError: there is no text, or a line is not UTF-8; the line is named.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    texts = list[str]()
    for record in read_documents(f"lines:{path}"):
        if not isinstance(record, Reject):
            texts += [record.text] if record.text else []
        elif record.reason != "empty":
            raise ValueError(f"{path}: line {record.line}: {record.reason}; it must be UTF-8")
    if not texts:
        raise ValueError(f"{path}: has no text")
    return texts


def vocabulary(texts: Sequence[str]) -> Tokenizer:
    """Make the vocabulary of the characters of documents and of the question."""
    return train_characters([*texts, "Where was  born?"])


def prepare(name: str, texts: Sequence[str], folder: Path) -> Path:
    """Make the corpus that pretraining reads, or find it where another call made it.

    Validation reads the same documents as training: the facts of every document are needed.

    Args:
        name: of the text. The corpus is also named after a hash of the documents.
        texts: the documents.
        folder: for the corpora of all texts.

    Returns:
        The corpus.
    """
    from data_prep.manifest import Settings
    from data_prep.run import prepare as prepare_corpus

    content = "".join(f"{text}\n" for text in texts).encode()
    folder /= f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    copies = [folder / "train.txt", folder / "valid.txt"]  # splits may not share an input
    train, valid = ([f"lines:{copy}"] for copy in copies)
    settings, corpus = Settings(valid_fraction=0.0), folder / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):  # runs of several seeds may begin together
        for copy in copies:
            if not copy.is_file():
                write_atomically(copy, content)
        vocabulary(texts).save(folder / FILE_NAME)
        prepare_corpus(train, corpus, folder / FILE_NAME, settings, valid_inputs=valid)
    return corpus


Columns = Sequence[str]
"""A question, and its answer where there are answers."""


def read_rows(path: Path, *, with_answers: bool = True) -> list[Columns]:
    """Read the rows of a TSV file, `question<TAB>answer`, but for blank lines.

    Args:
        path: in UTF-8.
        with_answers: refuse a file without answers; otherwise it has one in each row or in none.

    Raises:
        ValueError: there is no row, or one has another form.
    """
    lines = documents(path)
    rows: list[Columns] = [[field.strip() for field in line.split("\t")] for line in lines]
    columns = 2 if with_answers else min(2, len(rows[0]))
    for row in rows:
        if len(row) != columns or not all(row):
            form = "question<TAB>answer" if columns == 2 else "a question alone"
            raise ValueError(f"{path}: row {'<TAB>'.join(row)[:80]!r}: must be {form}")
    return rows


def score(rows: Sequence[Columns], predictions: Sequence[str]) -> str:
    """Describe how many predictions equal their answer."""
    if len(rows[0]) == 1:
        return "no accuracy: the file has no answers"
    correct = sum(row[1] == each for row, each in zip(rows, predictions, strict=True))
    return f"correct: {correct} of {len(rows)}, {100 * correct / len(rows):.1f} %"


def encode(rows: Sequence[Columns], tokenizer: Tokenizer, block: int, source: Path) -> list[Ids]:
    """Return `<s>` and each text of a row followed by `<mask>`, [n] for every row.

    Characters of questions that the vocabulary lacks become `<unk>`; they are counted and printed.

    Args:
        rows: with answers or without.
        tokenizer: of characters.
        block: most ids of a row.
        source: the file, for messages.

    Raises:
        ValueError: a row is longer than the block, or an answer has a character that the vocabulary
            lacks.
    """
    encoded, unknown = list[Ids](), 0
    for row in rows:
        texts = tokenizer.encode_batch(row)
        ids = [tokenizer.bos_id]
        for text in texts:
            ids += [*text.tolist(), tokenizer.mask_id]
        if len(ids) > block:
            raise ValueError(
                f"{source}: {row[0][:80]!r}: {len(ids)} tokens with <s> and <mask>; accepted: at "
                f"most {block}, which the model reads"
            )
        if any(tokenizer.unk_id in answer for answer in texts[1:]):
            raise ValueError(f"{source}: answer {row[1]!r}: has characters that the corpus lacks")
        unknown += ids.count(tokenizer.unk_id)
        encoded.append(np.array(ids, dtype=np.int64))
    if unknown:
        print(f"{source}: characters that the corpus lacks, read as <unk>: {unknown:,}")
    return encoded


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerObjective(DocumentObjective):
    """The tokens of a row from its first `<mask>` on are predicted. The model must be causal."""

    mask_id: int
    settings: CausalLMConfig = dataclasses.field(default_factory=CausalLMConfig)

    term = "answer"

    def mask(self, ids: Ids, key: Key) -> tuple[Ids, Ids]:
        """Return the ids of a row, and the positions from the first `<mask>` on; draw nothing."""
        return ids, np.arange(np.argmax(ids == self.mask_id), len(ids))


def answer_batches(
    rows: Sequence[Ids], batch_size: int, order_seed: int, objective: AnswerObjective
) -> ShuffledBatches:
    """Return the batches of rows; each epoch has an order of its own."""
    lengths = np.array([len(row) for row in rows])

    def collate(chosen: Sequence[int]) -> MicroBatch:
        blocks, tokens = [Block(rows[number]) for number in chosen], lengths[chosen]
        keys = [(order_seed, 0, number) for number in chosen]
        arrays = objective.collate(blocks, keys, int(tokens.max()))
        return MicroBatch(0, arrays, int(tokens.sum()), objective.targets(arrays))

    return ShuffledBatches(lengths, collate, batch_size, order_seed)
