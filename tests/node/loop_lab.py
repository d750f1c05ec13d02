"""Training loops of a user's own in processes of their own, each with its daemon: as docs/own-loop.md has them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec
import psutil  # type: ignore[import-untyped]
import torch

from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.protocol.manifest import render_manifest
from shoal.protocol.swarm_link import SwarmLink, format_link, join_line
from shoal.testnet.parent_death import ended_with_parent
from tests.node.forks import start_copy
from tests.node.lab import DEADLINE_S, Node, Swarm, assert_exact, environment, eventually

DOCUMENTS = tuple(Path(__file__).resolve().parents[2] / "docs" / name for name in ("own-loop.md", "recipes.md"))
WORDS = ("one fish", "two fish", "red fish", "blue fish")
LOOPBACK = {
    "SHOAL_LISTEN": "/ip4/127.0.0.1/tcp/0",
    "SHOAL_LANE_LISTEN": "127.0.0.1:0",
    "SHOAL_MDNS": "0",
    "SHOAL_TEST_MODE": "1",
    "OMP_NUM_THREADS": "1",
}
RESTARTS = ("--max-restarts", "3", "--monitor-interval", "0.1")
"""Options of torchrun."""
IMPORTED = """
import ast, json, runpy, sys
script = sys.argv[1]
imports = [step for step in ast.parse(open(script).read()).body if isinstance(step, (ast.Import, ast.ImportFrom))]
exec(compile(ast.Module(imports, []), script, "exec"), {})
sys.argv = [script, *json.loads(sys.stdin.readline())]
runpy.run_path(script, run_name="__main__")
"""
"""A program that imports what a script imports, and runs it once it is told with which arguments."""
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""As docs/own-loop.md says: ranks that are started again find no addresses of those before."""


def example(name: str) -> str:
    """The script of the documents that is introduced by its file's name, as a reader would copy it."""
    text = "\n".join(page.read_text() for page in DOCUMENTS)
    found = re.search(rf"^`{re.escape(name)}`.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def save_model(folder: Path) -> None:
    """Write a tiny Llama, whose values are the same each time, and its tokenizer, which knows `WORDS`."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    torch.manual_seed(0)
    words = sorted({word for line in WORDS for word in line.split()})
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    marks = {"unk_token": "?", "eos_token": "?", "pad_token": "?"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
    settings = transformers.LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    transformers.LlamaForCausalLM(settings).save_pretrained(folder)


class LoopNode(Node):
    """A node whose process is a training loop, of which the daemon is a child. python: what it is run by."""

    python = sys.executable

    def prepare(self, script: Path, **settings: str) -> None:
        """Have an interpreter that no process was copied from import what `script` does, beside others that do so."""
        if self.python != sys.executable:
            self._start(["-c", IMPORTED, str(script)], settings, told=subprocess.PIPE)

    def begin(self, script: Path, *arguments: str, ranks: int = 0, **settings: str) -> None:
        """Run `script` with the data folder and `arguments`; `settings` are added to the environment.

        ranks: run it in so many, under torchrun, which starts them again if one fails.
        """
        if self.running:  # it was prepared
            self._tell([str(self.folder), *arguments])
            return
        settings = settings | FRESH_STORE if ranks else settings
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *RESTARTS]
        words = [*(several if ranks else ()), str(script), str(self.folder), *arguments]
        self._start(words, settings)

    def _tell(self, arguments: Sequence[str]) -> None:
        assert isinstance(self.process, subprocess.Popen)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self.process.stdin.close()

    def _start(self, words: Sequence[str], settings: Mapping[str, str], told: int = subprocess.DEVNULL) -> None:
        assert not self.running
        self._events_began = len(self.all_events())
        with self._log_path.open("ab") as log:
            self._log_began = log.tell()
            if self.python == sys.executable:
                self.process = start_copy([self.python, *words], self._log_path, self._workplace, LOOPBACK | settings)
            self.process = self.process or subprocess.Popen(
                ended_with_parent([self.python, "-W", "ignore", *words]),
                stdin=told,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment() | LOOPBACK | settings,
                cwd=self._workplace,
                start_new_session=True,
            )
        self.lives.append([time.time(), float("inf")])

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, once it is there."""

        def found() -> psutil.Process | None:
            assert self.process is not None
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("RANK") == str(number):
                        return process
            return None

        return eventually(found, f"rank {number} of {self.folder.name}")

    def end(self) -> None:
        """As any node's, and that of its daemon and its ranks even if the process that started them died without."""
        super().end()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder) in process.cmdline():
                    process.kill()


class LoopSwarm(Swarm):
    """Some loops of one swarm, with few inner steps to a round.

    python: what they are run by. deadline_s: for one that imports much before it joins.
    """

    nodes: Sequence[LoopNode]  # type: ignore[assignment]

    def __init__(
        self,
        workplace: Path,
        *,
        nodes: int,
        founders: int | None = None,
        inner_steps: int = 10,
        python: str = sys.executable,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        super().__init__(workplace, nodes=nodes, founders=founders, workload=OWN_LOOP, options={})
        sync = msgspec.structs.replace(self.manifest.sync, inner_steps=inner_steps)
        self.manifest = msgspec.structs.replace(self.manifest, sync=sync)
        self.manifest_path.write_text(render_manifest(self.manifest))
        self.nodes = [LoopNode(node.folder, self.manifest_path, workplace) for node in self.nodes]
        for node in self.nodes:
            node.python = python
        self._deadline_s = deadline_s

    def __enter__(self) -> Self:
        return self

    def begin(self, script: str, *arguments: str, **settings: str) -> None:
        """Run the script on all nodes, each told the first one's address; they begin round 1 at once, linked."""
        self._begin(script, lambda first: (*arguments, *(() if first is None else (first.address,))), settings)

    def begin_by_link(self, script: str, *arguments: str, ranks: int = 0, **settings: str) -> None:
        """The same, but the first is told its manifest, and the others the line that `shoal link` prints there.

        ranks: of each node.
        """

        def told(first: LoopNode | None) -> Sequence[str]:
            if first is None:
                return str(self.manifest_path), *arguments
            link = SwarmLink(swarm=self.manifest.swarm_id, addresses=(first.address,))
            return join_line(format_link(link), OWN_LOOP), *arguments

        self._begin(script, told, settings, ranks)

    def _begin(
        self, script: str, told: Callable[[LoopNode | None], Sequence[str]], settings: Mapping[str, str], ranks: int = 0
    ) -> None:
        path = self.workplace / "loop.py"
        path.write_text(script)
        first, settings = self.nodes[0], {"SHOAL_HOLD": "1:train", **settings}
        for node in self.nodes:
            node.prepare(path, **settings)
        for node in self.nodes:
            if node is not first:
                first.wait("listening", self._deadline_s)
            arguments = told(None if node is first else first)
            node.begin(path, *arguments, ranks=ranks, **settings)
        for index, node in enumerate(self.nodes):  # what the next imports may take longer than a hold
            node.hold("1:train", self._deadline_s, self.nodes[:index])
        for node in self.nodes:
            node.wait("linked", self._deadline_s, self.nodes)
        for node in self.nodes:
            node.release()

    def finish(self, rounds: int) -> None:
        """Wait until all loops ended by themselves on the state of round `rounds`, certified by all; values exact."""
        for node in self.nodes:
            assert node.wait_exit(self._deadline_s) == 0, node.log
        last = [node.events("certified", round=rounds)[0] for node in self.nodes]
        assert len({event["digest"] for event in last}) == 1
        assert len(last[0]["members"]) == len(self.nodes)
        report = self.report(rounds)
        assert_exact(report)
        assert [round.contributors for round in report.rounds[1:]] == [len(self.nodes)] * (rounds - 1)
