"""Text dealt unevenly: no file to two nodes, topics to few of them, and what is held out to all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.lab.bench.skewed_text import deal_files, texts_of_nodes
from shoal.lab.bench.train_spec import NOBODY, TrainBench, workload_of
from shoal.lab.bench.train_swarm import node_line
from shoal.node.workloads.text import TextWorkload
from shoal.node.workloads.text_data import divide_files, library_files, load_corpus
from shoal.testnet.nodes import Launch

PATHS = [Path(f"topic{topic}", f"{number}.py") for topic in range(6) for number in range(50)] + [Path("alone.py")]


def test_files_are_dealt_once_and_equal_seeds_deal_alike() -> None:
    parts = deal_files(PATHS, nodes=4, alpha=0.3, seed=1)
    assert sorted(path for part in parts for path in part) == sorted(PATHS)
    assert deal_files(PATHS[::-1], nodes=4, alpha=0.3, seed=1) == parts
    assert deal_files(PATHS, nodes=4, alpha=0.3, seed=2) != parts


def largest_share(alpha: float) -> float:
    """Of each topic the share of the node that has most of it; the mean over topics and seeds."""
    shares = []
    for seed in range(1, 21):
        parts = deal_files(PATHS[:-1], nodes=4, alpha=alpha, seed=seed)
        for topic in range(6):
            shares.append(max(sum(path.parts[0] == f"topic{topic}" for path in part) for part in parts) / 50)
    return sum(shares) / len(shares)


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.01, 0.97, 1.0), (0.3, 0.6, 0.8), (100.0, 0.25, 0.4)])
def test_the_smaller_alpha_the_fewer_nodes_have_a_topic(alpha: float, least: float, most: float) -> None:
    assert least <= largest_share(alpha) <= most


def test_nodes_have_folders_of_their_own_text_and_the_same_held_out() -> None:
    bench = TrainBench(skew=0.3)
    whole = load_corpus(None)
    root, paths = library_files()
    _, held_out = divide_files(root, paths)
    with texts_of_nodes(bench, 1) as texts:
        assert len(texts) == 4
        corpora = [load_corpus(str(text)) for text in texts]
        for corpus in corpora:
            assert torch.equal(corpus.held_out, whole.held_out)
        assert sum(len(corpus.train) for corpus in corpora) == len(whole.train)
        assert min(len(corpus.train) for corpus in corpora) > len(whole.train) / 20
        files = [{path.relative_to(text) for path in text.rglob("*.py")} for text in texts]
        assert set.intersection(*files) == {path.relative_to(root) for path in held_out}
        workload = workload_of(bench.manifest(1, [NOBODY]), texts[2])
        assert workload == TextWorkload(batch=8, data=str(texts[2]))
        command = node_line(bench, texts)(Launch(manifest=Path("swarm.toml"), data_dir=Path("nodes", "2")))
        assert command[command.index("--data") + 1] == str(texts[2])
    assert not texts[0].exists()


def test_where_all_read_alike_nobody_has_a_folder() -> None:
    with texts_of_nodes(TrainBench(), 1) as texts:
        assert texts == []
