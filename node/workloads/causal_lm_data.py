"""Documents for the workload `causal-lm`: found, dealt to members, split into train and held-out, and packed.

A source is a table on disk, which is read at random places, or a stream from the Hugging Face Hub. Either is read
through `datasets`, which runs no code that lies beside the data and unpickles nothing. Which documents are held out
follows from their text alone: nodes agree on it, and no copy of a held-out document is trained on.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import blake3
import msgspec
import torch

from shoal.node.pipe import one_line
from shoal.node.workload import Assignment
from shoal.node.workloads.outsiders import share_of_order
from shoal.node.workloads.text_data import FILES_LIMIT
from shoal.protocol.errors import ConfigError

HELD_OUT_ONE_IN = 20
"""One document in so many is held out."""
HELD_OUT_SCAN_LIMIT = 200_000
"""So many documents are searched for held-out ones, at most."""
SHUFFLE_BUFFER = 256
"""Documents of a stream that are shuffled among themselves; a round's first batch waits for them."""
RESHARD_LIMIT = 256
"""A stream of at most so many files is cut finer, by row groups, which takes a request for each file."""
READ_DOCUMENTS = 16
MODELS = "models"
"""Below the data folder: models, which are no documents."""
SUFFIXES = {
    "parquet": (".parquet",),
    "json": (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"),
    "text": (".txt", ".text", ".md"),
}
SAMPLE_BY = ("line", "paragraph", "document")

Tokenize = Callable[[list[str]], list[list[int]]]


class Documents(Protocol):
    """A finite collection of texts, in an order that all nodes agree on."""

    def share(self, assignment: Assignment, turn: int) -> Iterator[str]:
        """Yield what is dealt to a member, once each, in the order of its pass number `turn`.

        Shares of the members of a round are disjoint, in every pass, and cover everything. A peer outside the
        electorate reads all, in an order of its own: where documents can be read at any place, first those that no
        member comes to. Raises `ConfigError` if members outnumber documents.
        """

    def everything(self) -> Iterator[str]:
        """Yield all, in the order of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """A dataset of the Hub. `config` and `revision` are empty where the dataset's default is meant."""

    name: str
    config: str
    revision: str
    split: str
    streaming: bool


def open_documents(*, data: str | None, hub: Hub | None, column: str, sample_by: str) -> Documents:
    """Open the node's own files if `data` has any, else the dataset `hub`.

    column: which one holds the text. sample_by: what of a plain text file is one document, a line, a paragraph or
    the file. Raises `ConfigError`.
    """
    paths = local_files(Path(data).expanduser()) if data is not None else []
    if paths:
        return _Table(_load_files(paths, sample_by), column, what=str(data))
    if hub is None:
        kinds = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes[:1])
        raise ConfigError(f"there is nothing to train on; give --data a folder of {kinds} files, or name a dataset")
    loaded = _load_hub(hub)
    return _Stream(loaded, column, what=hub.name) if hub.streaming else _Table(loaded, column, what=hub.name)


def local_files(root: Path) -> list[Path]:
    """List the documents' files: `root` itself, or those below it by relative name, but for hidden ones and models.

    Raises `ConfigError` if there is no `root`, or it mixes Parquet and JSON; plain text beside them is left out.
    """
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"there is no file or folder {str(root)!r}; give --data the path of some documents")
    kinds: dict[str, list[Path]] = {}
    for seen, path in enumerate(sorted(root.rglob("*"), key=lambda path: path.relative_to(root).as_posix())):
        if seen >= FILES_LIMIT:
            raise ConfigError(f"{root} holds over {FILES_LIMIT} files; point --data deeper")
        parts = path.relative_to(root).parts
        kind = _kind(path)
        if kind and parts[0] != MODELS and not any(part.startswith(".") for part in parts) and path.is_file():
            kinds.setdefault(kind, []).append(path)
    if "parquet" in kinds and "json" in kinds:
        raise ConfigError(f"{root} holds Parquet and JSON; point --data at one kind")
    return kinds.get("parquet") or kinds.get("json") or kinds.get("text") or []


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _load_files(paths: Sequence[Path], sample_by: str) -> Any:
    import datasets

    kind = _kind(paths[0]) or "text"
    options = {"sample_by": sample_by} if kind == "text" else {}
    files = [glob.escape(str(path.absolute())) for path in paths]
    try:
        return datasets.load_dataset(kind, data_files=files, split="train", **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = one_line(error.__cause__ or error)
        raise ConfigError(f"{paths[0]} cannot be read as {kind}: {why}; mend or remove it") from None


def _load_hub(hub: Hub) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            f"hf://datasets/{hub.name}",  # so that no folder of that name is taken for it
            hub.config or None,
            revision=hub.revision or None,
            split=hub.split,
            streaming=hub.streaming,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"dataset {hub.name!r} cannot be opened: {one_line(error)}; check its name, or the connection"
        ) from None


class _Table:
    """Documents that can be read at any place, of a `datasets.Dataset`."""

    def __init__(self, rows: Any, column: str, *, what: str) -> None:
        _require_column(rows.column_names, column, what)
        self._rows = rows.select_columns([column])
        self._column = column
        self._what = what

    def share(self, assignment: Assignment, turn: int) -> Iterator[str]:
        """All shuffle the indices alike, by seed and round, and each reads its share of that order (`outsiders`)."""
        count = len(self._rows)
        if count < assignment.members:
            raise ConfigError(
                f"{self._what}: {count} documents for {assignment.members} members; give it more with --data"
            )
        common = msgspec.structs.replace(assignment, member=0)
        own = share_of_order(torch.randperm(count, generator=_generator(common, 0)), assignment)
        return self._read(own if turn == 0 else own[torch.randperm(len(own), generator=_generator(assignment, turn))])

    def everything(self) -> Iterator[str]:
        return self._read(torch.arange(len(self._rows)))

    def _read(self, indices: torch.Tensor) -> Iterator[str]:
        """Read `indices`, ``(n,) int64``, some at a time."""
        for some in torch.split(indices, READ_DOCUMENTS):
            for text in self._rows[some.tolist()][self._column]:
                yield _as_text(text, self._column, self._what)


class _Stream:
    """Documents that come over the network, of a `datasets.IterableDataset`, in shards that can be read by themselves.

    A member reads every n-th shard, another set of them each round; where there are fewer shards than members, all
    read alike and each keeps every n-th document.
    """

    def __init__(self, rows: Any, column: str, *, what: str) -> None:
        self._rows = rows.reshard() if rows.num_shards <= RESHARD_LIMIT else rows
        self._column = column
        self._what = what
        _require_column(rows.column_names or list(next(iter(rows), {})), column, what)

    def share(self, assignment: Assignment, turn: int) -> Iterator[str]:
        """The order of shards and of neighbouring documents is drawn by seed, round and pass."""
        from datasets.distributed import split_dataset_by_node

        member, members = assignment.member, assignment.members
        if member >= members:
            return self._read(_shuffled(self._rows, assignment, turn))
        if self._rows.num_shards >= members:
            own = self._rows.shard(members, (member + assignment.round) % members, contiguous=False)
            return self._read(_shuffled(own, assignment, turn))
        # every pass in the same order, or places would change hands
        return self._read(split_dataset_by_node(_shuffled(self._rows, assignment, 0), rank=member, world_size=members))

    def everything(self) -> Iterator[str]:
        return self._read(self._rows)

    def _read(self, rows: Any) -> Iterator[str]:
        for row in rows:
            yield _as_text(row[self._column], self._column, self._what)


def _order_seed(assignment: Assignment, turn: int) -> int:
    """A seed that the members of a round have in common, and that each peer outside has for itself."""
    outside = assignment.member >= assignment.members
    dealer = assignment if outside else msgspec.structs.replace(assignment, member=0)
    return (dealer.stream_seed + turn) & (2**63 - 1)


def _generator(assignment: Assignment, turn: int) -> torch.Generator:
    return torch.Generator().manual_seed(_order_seed(assignment, turn))


def _shuffled(rows: Any, assignment: Assignment, turn: int) -> Any:
    """Shuffle the shards of a stream, and documents within a shard; one shard is open at a time."""
    seed = _order_seed(assignment, turn)
    return rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER, max_buffer_input_shards=1)


def _require_column(columns: Sequence[str], column: str, what: str) -> None:
    if column not in columns:
        raise ConfigError(f"{what} has no column {column!r}; set text_column to one of: {', '.join(columns)}")


def _as_text(value: Any, column: str, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{what}: column {column!r} holds {type(value).__name__}, not text; set text_column")
    return value


def is_held_out(text: str) -> bool:
    """True if a document is for evaluation, by the hash of its text."""
    return blake3.blake3(text.encode(errors="surrogatepass")).digest()[0] * HELD_OUT_ONE_IN < 256


def training_texts(source: Documents, assignment: Assignment) -> Iterator[str]:
    """Yield a member's documents that are not held out, pass after pass. Raises `ConfigError` if it has none."""
    for turn in itertools.count():
        found = False
        for text in source.share(assignment, turn):
            if text.strip() and not is_held_out(text):
                found = True
                yield text
        if not found:
            raise ConfigError(
                f"member {assignment.member} of {assignment.members} has no document to train on; add some"
            )


def held_out_texts(source: Documents) -> Iterator[str]:
    """Yield the documents for evaluation, once, in the order of the source."""
    some = itertools.islice(source.everything(), HELD_OUT_SCAN_LIMIT)
    return (text for text in some if text.strip() and is_held_out(text))


def pack(texts: Iterator[str], tokenize: Tokenize, *, end: int, length: int) -> Iterator[torch.Tensor]:
    """Yield blocks ``(length,) int64``: the documents' tokens one after the other, `end` after each document.

    What does not fill a block at the end of `texts` is dropped.
    """
    tokens: list[int] = []
    while some := list(itertools.islice(texts, READ_DOCUMENTS)):
        for document in tokenize(some):
            tokens += document
            tokens.append(end)
        full = len(tokens) // length
        yield from torch.tensor(tokens[: full * length], dtype=torch.int64).view(full, length)
        del tokens[: full * length]
