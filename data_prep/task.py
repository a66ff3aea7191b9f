"""Description of the work on one shard."""

from dataclasses import dataclass
from pathlib import Path

from data_prep.inputs import Input
from data_prep.manifest import Settings


@dataclass(frozen=True)
class ShardTask:
    """Description of a shard, small enough to send to any process.

    The vocabulary is read from the corpus folder.
    """

    index: int
    input: Input
    corpus: Path
    settings: Settings
    tokenizer_digest: str
    role: str = "both"

    @property
    def name(self) -> str:
        """File stem of the shard."""
        return f"shard-{self.index:05d}"

    @property
    def manifest_file(self) -> Path:
        """The shard's manifest, which is written last and marks the shard as finished."""
        return self.corpus / "shards" / f"{self.name}.json"
