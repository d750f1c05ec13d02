"""Text of the standard library dealt unevenly: each node has a part of its own, in which some topics prevail.

A topic is a package, or a module that lies in none. Of topic k, each file goes to one of n nodes, drawn by shares

    p_k ~ Dirichlet(α, …, α)      over the nodes; the smaller α, the fewer nodes have all of a topic

so that no two nodes read the same file, and how much text each has differs too. What is held out is the same for all.

Source: NIID-Bench, arXiv 2102.02079, section 4.1 (distribution-based label imbalance), with topics in place of labels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from shoal.lab.bench.train_spec import TrainBench
from shoal.node.workloads.text_data import divide_files, library_files


def deal_files(paths: Sequence[Path], *, nodes: int, alpha: float, seed: int) -> list[list[Path]]:
    """Deal files, with names below the library's folder, to nodes by topics. Equal arguments give equal parts."""
    topics: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        topics[path.parts[0]].append(path)
    draw = np.random.default_rng(seed)
    parts: list[list[Path]] = [[] for _ in range(nodes)]
    for name in sorted(topics):
        shares = draw.dirichlet([alpha] * nodes)
        for path, node in zip(topics[name], draw.choice(nodes, size=len(topics[name]), p=shares), strict=True):
            parts[node].append(path)
    return parts


@contextmanager
def texts_of_nodes(bench: TrainBench, seed: int) -> Iterator[list[Path]]:
    """A folder with each node's own text, as long as the context lasts; none where all read the whole library."""
    if bench.skew is None:
        yield []
        return
    root, paths = library_files()
    train, held_out = ([path.relative_to(root) for path in half] for half in divide_files(root, paths))
    with TemporaryDirectory(prefix="shoal-text-") as name:
        folders = []
        for index, part in enumerate(deal_files(train, nodes=bench.nodes, alpha=bench.skew, seed=seed)):
            folders.append(Path(name, str(index)))
            for path in (*part, *held_out):
                link = folders[index] / path
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(root / path)
        yield folders
