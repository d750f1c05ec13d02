"""A real `shoal engine` over tiny models that are made here, and what it is asked over HTTP."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from shoal.node.option import HostPort
from shoal.node.sapo.causal_lm_policy import CausalLMPolicy, CausalLMSettings
from shoal.node.sapo.policy import Sample
from shoal.testnet.parent_death import ended_with_parent
from tests.node.lab import command, environment, eventually
from tests.node.sapo.test_causal_lm_policy import new_model, new_tokenizer

CALL_DEADLINE_S = 120.0
START_DEADLINE_S = 240.0
"""It imports transformers, on a machine that does other things: it bounds a test that fails."""


def save_model(folder: Path, *, shift: float = 0.0) -> Path:
    """A tiny causal LM in the layout of Hugging Face; another one by each `shift` of its parameters."""
    model: Any = new_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    model.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    return folder


class Judge:
    """The models of a test, to see which of them drew what."""

    def __init__(self, **shifts: float) -> None:
        self._policies: dict[str, CausalLMPolicy] = {}
        for name, shift in shifts.items():
            model = new_model()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(shift)
            settings = CausalLMSettings(prompt_tokens=12, completion_tokens=8)
            self._policies[name] = CausalLMPolicy(model, new_tokenizer(), settings)

    def names(self, prompt: str, tokens: tuple[int, ...], log_probs: tuple[float, ...]) -> list[str]:
        """Those that give these tokens these log-probabilities."""
        return [
            name
            for name, policy in self._policies.items()
            if torch.allclose(self._log_probs(policy, prompt, tokens), torch.tensor(log_probs), atol=1e-4)
        ]

    def text(self, tokens: tuple[int, ...]) -> str:
        return next(iter(self._policies.values())).decode(tokens)

    @staticmethod
    def _log_probs(policy: CausalLMPolicy, prompt: str, tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return policy.log_probs([Sample(prompt=policy.encode_prompt(prompt), completion=tokens)])[0]


class Engine:
    """A process of `shoal engine`; a context manager that leaves none behind. Started again, it has the same port."""

    def __init__(self, model: Path, *options: str) -> None:
        self._model, self._options = model, options
        self._port = 0
        self.log = model.parent / "engine.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start it, and wait until it serves; returns the policy that it says it has."""
        place = ["--port", str(self._port), "--device", "cpu"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ended_with_parent(command("engine", "--model", str(self._model), *place, *self._options)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment() | {"OMP_NUM_THREADS": "1"},
            )
        try:
            told = eventually(self._said, "the engine serves", START_DEADLINE_S)
        except BaseException:
            self.kill()
            raise
        self._port = int(told.split()[0].rpartition(":")[2])
        return str(told.rpartition(" ")[2])

    def _said(self) -> str:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        lines = self.log.read_text(errors="replace").split("\n")[:-1]
        return next((line for line in lines if " serves " in line), "")

    @property
    def address(self) -> HostPort:
        return HostPort("127.0.0.1", self._port)

    def __enter__(self) -> Self:
        self.policy = self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)

    def interrupt(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def ask(
        self, path: str, body: object = None, *, headers: dict[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, Any]:
        """Status, and the answer's JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=CALL_DEADLINE_S)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def load(self, model: Path, **more: object) -> str:
        """Have it take another model; the policy that it says it has then."""
        status, card = self.ask("/v1/load", {"model": str(model), **more})
        assert status == 200, card
        return str(card["weight_version"])
