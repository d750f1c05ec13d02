"""Recipes of the documents, run as they stand by real nodes in an environment that has what they need.

Nothing is fetched but packages, from the index.
"""

from __future__ import annotations

import json
import math
import random
import re
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.workloads.causal_lm_data import MODELS
from tests.node.lab import Swarm, shoal
from tests.node.loop_lab import WORDS, LoopNode, LoopSwarm, example, save_model

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]  # peft's, of transformers

PACKAGES = Path(__file__).with_name("recipes.txt")
OPERATING = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
TASK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROUNDS = 4
DEADLINE_S = 600.0
"""For a process that imports what these libraries import, beside other tests."""

Tensors = dict[str, torch.Tensor]
Trained = Callable[..., list[LoopNode]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment of its own above this one, with the packages of the recipes."""
    place = tmp_path_factory.mktemp("recipes")
    run(sys.executable, "-m", "venv", "--without-pip", str(place))
    (folder,) = (place / "lib").glob("python*/site-packages")
    above = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (folder / "above.pth").write_text("".join(above))
    found = str(place / "bin" / "python")
    run(sys.executable, "-m", "pip", "--python", found, "install", "--quiet", "--no-deps", "-r", str(PACKAGES))
    return found


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def trained(tmp_path: Path, python: str) -> Trained:
    """A function that runs a recipe on two nodes to its end, and returns these."""
    save_model(tmp_path / "model")
    (tmp_path / "text").write_text("\n".join(" ".join(WORDS[at:] + WORDS[:at]) for at in (0, 1, 2, 3) * 20))

    def train(name: str, *arguments: Path, **settings: str) -> list[LoopNode]:
        given = {"SHOAL_ROUNDS": str(ROUNDS), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        with LoopSwarm(tmp_path, nodes=2, python=python, deadline_s=DEADLINE_S) as swarm:
            swarm.begin_by_link(example(name), *map(str, arguments), **given, **settings)
            swarm.finish(ROUNDS)
            return list(swarm.nodes)

    return train


def exported(node: LoopNode) -> Tensors:
    """What `shoal export` writes of a node's newest state, by the names in its model."""
    out = node.folder.with_name(f"{node.folder.name}-exported")
    done = shoal("export", str(node.folder), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return load_file(out / "model.safetensors")


def assert_saved(nodes: list[LoopNode], read: Callable[[Path], Tensors]) -> Tensors:
    """Assert that all nodes saved the certified values, as they are exported; return these."""
    values = exported(nodes[0])
    for node in nodes:
        saved = read(node.folder)
        assert {name.replace(".default.", ".") for name in values} == set(saved)
        for name, value in values.items():
            assert torch.equal(value, saved[name.replace(".default.", ".")]), (node.folder.name, name)
    return values


def adapters(folder: Path) -> Tensors:
    return load_file(folder / "model" / "adapter_model.safetensors")


def whole(folder: Path) -> Tensors:
    return load_file(folder / "model" / "model.safetensors")


def held_out(node: LoopNode) -> list[float]:
    return [event["loss"] for event in node.events("evaluated")]


def text_loss(model: Any, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


def text_pieces(tmp_path: Path) -> torch.Tensor:
    """Return ``(8, 16) int64``: what recipes of a text hold out."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")((tmp_path / "text").read_text())["input_ids"]
    return torch.tensor(tokens[: 8 * 16]).view(8, 16)


def test_trls_sft_trainer_takes_the_callback_and_its_adapters_alone_travel(tmp_path: Path, trained: Trained) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    nodes = trained("sft.py", tmp_path / "model", tmp_path / "text")
    assert sum(value.numel() for value in assert_saved(nodes, adapters).values()) == 2 * 2 * 4 * 64
    pieces = text_pieces(tmp_path)
    before = text_loss(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), pieces)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert text_loss(PeftModel.from_pretrained(base, nodes[1].folder / "model"), pieces) < before


def test_trls_grpo_trainer_raises_what_is_rewarded(tmp_path: Path, trained: Trained) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    nodes = trained("grpo.py", tmp_path / "model")
    assert_saved(nodes, whole)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompts = torch.tensor([[tokenizer.convert_tokens_to_ids(word)] for word in ("one", "two", "red", "blue")])

    def fish(folder: Path) -> float:
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=prompts).logits[:, -1]
        return float(logits.softmax(-1)[:, tokenizer.convert_tokens_to_ids("fish")].mean())

    assert fish(nodes[0].folder / "model") > 1.2 * fish(tmp_path / "model")
    for node in nodes:
        assert all(event["tokens"] > 0 for event in node.events("contributed"))


def test_adapters_on_a_base_of_four_bits_travel_and_learn(tmp_path: Path, trained: Trained) -> None:
    nodes = trained("quantized.py", tmp_path / "model", tmp_path / "text")
    assert sum(value.numel() for value in assert_saved(nodes, adapters).values()) == 2 * 2 * 4 * 64
    for node in nodes:
        losses = [event["loss"] for event in node.events("contributed")]
        assert losses[-1] < losses[0], losses


def test_lightning_is_a_node_by_a_callback(trained: Trained) -> None:
    nodes = trained("lightning_node.py")
    values = assert_saved(nodes, lambda folder: torch.load(folder / "model.pt"))
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(16, 1)
    model.load_state_dict({name.removeprefix("net."): value for name, value in values.items()})
    with torch.no_grad():
        loss = float(torch.nn.functional.mse_loss(model(x)[:, 0], x @ torch.linspace(-1, 1, 16)))
    for node in nodes:
        assert math.isclose(held_out(node)[-1], loss, rel_tol=1e-6)
        assert held_out(node)[-1] < 0.95 * held_out(node)[0]
        assert [event["tokens"] for event in node.events("contributed")][1:] == [10 * 64] * (ROUNDS - 1)


READER = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

raw, at, data, rows = Path(sys.argv[1]).read_bytes(), 7, b"", []  # a log of LevelDB behind a head of seven bytes
while at + 7 <= len(raw):
    left = 32768 - at % 32768
    if left < 7:
        at += left
        continue
    size, kind = struct.unpack_from("<HB", raw, at + 4)
    data += raw[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # whole, or the last part of one
        record, data = Record.FromString(data), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items})
print(json.dumps(rows))
"""


def test_weights_and_biases_offline_has_what_node_and_trainer_reported(
    tmp_path: Path, python: str, trained: Trained
) -> None:
    from transformers import AutoModelForCausalLM

    nodes = trained("logged.py", tmp_path / "model", tmp_path / "text", WANDB_MODE="offline")
    assert_saved(nodes, whole)
    loss = text_loss(AutoModelForCausalLM.from_pretrained(nodes[0].folder / "model"), text_pieces(tmp_path))
    assert math.isclose(held_out(nodes[0])[-1], loss, rel_tol=1e-5)
    for node in nodes:  # the daemons' runs, by round
        (file,) = node.folder.rglob("*.wandb")
        rows = json.loads(run(python, "-c", READER, str(file)))
        assert {row["round"] for row in rows} >= set(range(1, ROUNDS + 1))
        assert [row["evaluation/loss"] for row in rows if "evaluation/loss" in row][-1] == held_out(node)[-1]
    files = [*(tmp_path / "wandb").rglob("*.wandb")]  # the Trainers'
    assert len(files) == len(nodes)
    for file in files:
        rows = json.loads(run(python, "-c", READER, str(file)))
        told = [row for row in rows if "train/swarm_round" in row]
        assert {row["train/swarm_members"] for row in told} == {2}
        assert max(row["train/swarm_round"] for row in told) >= ROUNDS - 1
        assert any(row.get("train/swarm_held_out_loss") in held_out(nodes[0]) for row in told)


def test_state_is_measured_by_the_real_harness_with_a_task_of_its_users_own(tmp_path: Path, python: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data, documents = tmp_path / "data", random.Random(0)
    save_model(data / MODELS / "own" / "tiny")
    (data / "fish.txt").write_text("\n\n".join(" ".join(documents.choices(WORDS, k=8)) for _ in range(200)))
    options: dict[str, str | int | float | bool] = {"model": "own/tiny", "sequence_length": 8, "bf16": False}
    with Swarm(tmp_path, nodes=1, workload="causal-lm", options=options) as swarm:
        (node,) = swarm.nodes
        node.start("--rounds", "2", "--data", str(data))
        assert node.wait_exit(DEADLINE_S) == 0, node.log
    questions = [("one", "fish"), ("one", "red"), ("two", "fish"), ("red", "red"), ("blue", "fish")]
    (tmp_path / "fish.jsonl").write_text("".join(json.dumps({"text": a, "next": b}) + "\n" for a, b in questions))
    (task,) = TASK.findall(OPERATING.read_text())
    (tmp_path / "fish.yaml").write_text(task.replace("/home/me/", f"{tmp_path}/").replace("bird", "red"))

    command = [python, "-W", "ignore", "-m", "shoal.cli.main", "evaluate", str(node.folder), "--data", str(data)]
    told = json.loads(run(*command, "--task", str(tmp_path / "fish.yaml"), "--json"))
    last = node.events("certified")[-1]
    assert (told["round"], told["digest"]) == (last["round"], last["digest"])

    out = tmp_path / "exported"
    assert shoal("export", str(node.folder), "--out", str(out), "--data", str(data)).returncode == 0
    tokenizer = AutoTokenizer.from_pretrained(out / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(out / "huggingface").eval()
    fish, red = tokenizer.convert_tokens_to_ids(["fish", "red"])
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([tokenizer(a)["input_ids"]])).logits[0, -1] for a, _ in questions]
    right = [(row[fish] > row[red]) == (b == "fish") for row, (_, b) in zip(logits, questions, strict=True)]
    assert told["tasks"]["fish"]["acc"] == pytest.approx(sum(map(bool, right)) / len(right))
    assert bool(right[0]) != bool(right[1])
