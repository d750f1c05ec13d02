"""The reference engine: OpenAI's completions over HTTP, from one causal language model, with its log-probabilities.

    POST /v1/completions   {"prompt", "max_tokens", "temperature", "n", "seed", "stop", "logprobs", "return_token_ids"}
    POST /v1/load          {"model": folder, "version"}: take this model from now on; of this machine only
    GET  /v1/models        the model, its policy, vocabulary and room
    GET  /health

Requests are answered one after the other, in the order in which they came, and a load waits for its turn among them: so
each reply is of one policy, and says of which, as `metadata.weight_version`: the version that the load named, and a
digest of the parameters as they are in memory. The `n` completions of a request are one batch. With a seed they are the
same whenever they are asked for on one machine. Log-probabilities are at the request's temperature.

What this engine does not do (streaming, several models, top_p …) it refuses, in words. Bounded are the bytes of a
request, its tokens, and how many wait; a request whose client is gone is given up. Models are read from safetensors,
and nothing that lies beside one is run. Needs the extra `hf`.
"""

from __future__ import annotations

import itertools
import logging
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
import trio
from blake3 import blake3
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.node.dashboard.server import serve
from shoal.node.dashboard.service import is_loopback
from shoal.node.sapo.causal_lm_policy import CausalLMPolicy, CausalLMSettings
from shoal.node.sapo.completions import decode_json
from shoal.node.sapo.policy import Draws, Rollout
from shoal.node.training.devices import pick_device
from shoal.node.workloads.causal_lm_model import load_model, load_tokenizer
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_rollouts import COMPLETION_TOKENS_LIMIT
from shoal.protocol.rollouts import COMPLETION_LIMIT
from shoal.protocol.wire import COUNTER_LIMIT

BODY_LIMIT_BYTES = 256 << 10
BODY_DEADLINE_S = 15.0
QUEUE_LIMIT = 64
"""Requests that wait or are answered."""
BATCH_LIMIT_TOKENS = 1 << 19
"""Of all completions of a request with their prompts: what a machine's memory may have to hold."""
ROOM_TOKENS = 1 << 16
"""Of a model that does not say how much it reads."""
STOPS_LIMIT, STOP_LIMIT_CHARS = 4, 64
DIGEST_CHARS: Final = 16

logger = logging.getLogger(__name__)

T = TypeVar("T")
Stop = Annotated[str, Meta(min_length=1, max_length=STOP_LIMIT_CHARS)]
Counter = Annotated[int, Meta(ge=0, le=COUNTER_LIMIT)]


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for completions. model, user: not looked at. What has one value here can have no other."""

    prompt: Annotated[str, Meta(min_length=1)] | Annotated[list[Counter], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=COMPLETION_TOKENS_LIMIT)] = 16
    temperature: Annotated[float, Meta(gt=0, le=10)] = 1.0
    n: Annotated[int, Meta(ge=1, le=COMPLETION_LIMIT)] = 1
    seed: Counter | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_LIMIT)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    return_token_ids: bool = False
    model: str | None = None
    user: str | None = None
    stream: Literal[False] | None = None
    echo: Literal[False] | None = None
    top_p: Annotated[float, Meta(ge=1, le=1)] | None = None

    @property
    def stops(self) -> Sequence[str]:
        """The texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish for another model. version: the next one, if none is named."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    version: Annotated[int, Meta(ge=0, lt=10**18)] | None = None


class Refused(Exception):
    """A request that is not answered, with what to say of it."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model in memory. policy: its version and its digest, which no other parameters have."""

    name: str
    version: int
    policy: str
    model: Any
    tokenizer: Any
    room: int

    @property
    def vocabulary(self) -> int:
        """Tokens are below it."""
        return int(self.model.get_output_embeddings().weight.shape[0])


def load(folder: Path, *, version: int, device: torch.device) -> Served:
    """Load a causal language model and its tokenizer. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name one with a model in the layout of Hugging Face")
    try:
        model: Any = load_model(folder, pretrained=True)
        tokenizer = load_tokenizer(folder)
    except ImportError:
        raise ConfigError("an engine needs its extra: pip install 'shoal[hf]'") from None
    room = getattr(model.config, "max_position_embeddings", None)
    return Served(
        name=folder.resolve().name,
        version=version,
        policy=f"{version}-{digest_of(model)[:DIGEST_CHARS]}",
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        room=room if isinstance(room, int) else ROOM_TOKENS,
    )


def digest_of(model: torch.nn.Module) -> str:
    """BLAKE3 over the names, shapes and bytes of a model's tensors, in the order of their names."""
    hasher = blake3()
    for name, tensor in sorted(model.state_dict().items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def complete(served: Served, asked: Asked, gone: Callable[[], bool]) -> dict[str, Any]:
    """Draw the completions of a request, unless its client is `gone`. Raises Refused."""
    prompt = _prompt(served, asked)
    policy = CausalLMPolicy(
        served.model,
        served.tokenizer,
        CausalLMSettings(prompt_tokens=len(prompt), completion_tokens=asked.max_tokens, temperature=asked.temperature),
        device=served.model.device,
    )
    rollouts = [Rollout(prompt=prompt, draws=_draws(asked.seed, at)) for at in range(asked.n)]
    drawing = _Drawing(policy, rollouts, asked.stops)
    policy.extend(rollouts, enough=lambda: gone() or drawing.done())
    if not drawing.done():
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, "nobody waits for it")
    drawn = sum(len(rollout.tokens) for rollout in drawing.rollouts)
    return {
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
        "choices": [_choice(served, asked, drawing, at) for at in range(asked.n)],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": drawn, "total_tokens": len(prompt) + drawn},
        "metadata": {"weight_version": served.policy, "vocabulary": served.vocabulary},
    }


def _draws(seed: int | None, completion: int) -> Draws:
    """Draws of a completion: of the first by the seed, of the next ones by those after it; by chance without one."""
    chance = random.Random(None if seed is None else seed + completion)
    return lambda _: chance.random()


class _Drawing:
    """Completions under way, each of which may come to one of `stops` before it is done."""

    def __init__(self, policy: CausalLMPolicy, rollouts: list[Rollout], stops: Sequence[str]) -> None:
        self.rollouts = rollouts
        self.stopped: dict[int, tuple[int, str]] = {}
        """How many tokens led to a stop, and the text before it."""
        self._policy = policy
        self._stops = stops

    def done(self) -> bool:
        """Look for stops; true once every completion has come to an end."""
        if self._stops:
            for at, rollout in enumerate(self.rollouts):
                text = None if at in self.stopped else _cut(self._policy.decode(rollout.tokens), self._stops)
                if text is not None:
                    self.stopped[at] = len(rollout.tokens), text
        return all(rollout.done or at in self.stopped for at, rollout in enumerate(self.rollouts))

    def end(self, at: int) -> tuple[int, str]:
        """How many tokens of a completion count, and its text."""
        tokens = self.rollouts[at].tokens
        return self.stopped.get(at) or (len(tokens), self._policy.decode(tokens))


def _prompt(served: Served, asked: Asked) -> tuple[int, ...]:
    """The tokens of a request's prompt. Raises Refused for more than the model, or this engine, can have."""
    if isinstance(asked.prompt, str):
        prompt = tuple(served.tokenizer(asked.prompt)["input_ids"]) or (served.tokenizer.eos_token_id,)
    else:
        prompt = tuple(asked.prompt)
        if max(prompt) >= served.vocabulary:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the vocabulary has {served.vocabulary} tokens")
    length = len(prompt) + asked.max_tokens
    if length > served.room:
        raise Refused(
            HTTPStatus.BAD_REQUEST,
            f"the model reads {served.room} tokens; prompt ({len(prompt)}) and max_tokens are more",
        )
    if length * asked.n > BATCH_LIMIT_TOKENS:
        raise Refused(HTTPStatus.BAD_REQUEST, f"a request has {BATCH_LIMIT_TOKENS} tokens at most, its prompt n times")
    return prompt


def _choice(served: Served, asked: Asked, drawing: _Drawing, at: int) -> dict[str, Any]:
    rollout, (count, text) = drawing.rollouts[at], drawing.end(at)
    tokens = rollout.tokens[:count]
    ended = at in drawing.stopped or tokens[-1] == served.tokenizer.eos_token_id
    log_probs = {
        "tokens": served.tokenizer.convert_ids_to_tokens(tokens),
        "token_logprobs": rollout.log_probs[:count],
        "top_logprobs": None,
        "text_offset": [],
    }
    return {
        "index": at,
        "text": text,
        "finish_reason": "stop" if ended else "length",
        "logprobs": None if asked.logprobs is None else log_probs,
        **({"token_ids": tokens} if asked.return_token_ids else {}),
    }


def _cut(text: str, stops: Sequence[str]) -> str | None:
    """The text up to the first of `stops`; None if there is none of them."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(places)] if places else None


class CompletionServer:
    """One model behind HTTP. loopback: whether only this machine can connect."""

    def __init__(self, served: Served, *, device: torch.device, loopback: bool) -> None:
        self._served = served
        self._device = device
        self._loopback = loopback
        self._turn = trio.Lock()  # which is fair
        self._waiting = 0
        self._numbers = itertools.count(1)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self._answer(self._complete), methods=["POST"]),
                Route("/v1/load", self._answer(self._load), methods=["POST"]),
                Route("/v1/models", self._answer(self._models)),
                Route("/health", self._answer(self._health)),
            ]
        )

    async def run(self, listening: socket.socket, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until cancelled."""
        await serve(self.app, listening, task_status=task_status)  # type: ignore[arg-type]

    def _answer(
        self, handle: Callable[[Request], Awaitable[dict[str, Any]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                self._check(request)
                if request.method == "POST" and self._waiting >= QUEUE_LIMIT:
                    raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{QUEUE_LIMIT} requests wait already")
                status, answer = HTTPStatus.OK, await handle(request)
            except Refused as refused:
                status = refused.status
                answer = {"error": {"message": str(refused), "type": status.phrase, "code": int(status)}}
            headers = {"retry-after": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
            return Response(msgspec.json.encode(answer), status, headers, media_type="application/json")

        return answered

    def _check(self, request: Request) -> None:
        """Refuse what a web page that is open on this machine could send. Raises Refused."""
        if self._loopback and not _names_this_machine(request):
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this name is not the engine's; use its address")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send application/json")

    async def _complete(self, request: Request) -> dict[str, Any]:
        asked = decoded(await _body(request), Asked)
        gone = threading.Event()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            gone.set()

        def drawn() -> dict[str, Any] | Refused:
            try:
                return complete(self._served, asked, gone.is_set)
            except Refused as refused:
                return refused

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                reply = await self._in_turn(drawn)
            finally:
                gone.set()
                nursery.cancel_scope.cancel()
        if isinstance(reply, Refused):
            raise reply
        return {"id": f"cmpl-{next(self._numbers)}", **reply}

    async def _load(self, request: Request) -> dict[str, Any]:
        came_from_here = request.client is not None and is_loopback(request.client.host)
        if not (came_from_here and _names_this_machine(request)):  # else a page in a browser here may have sent it
            raise Refused(HTTPStatus.FORBIDDEN, "models are loaded at the wish of this machine only, at its loopback")
        wish = decoded(await _body(request), Load)

        def take() -> None:
            version = self._served.version + 1 if wish.version is None else wish.version
            try:
                self._served = load(Path(wish.model), version=version, device=self._device)
            except ConfigError as error:
                raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None

        await self._in_turn(take)
        logger.info("now %s, policy %s", self._served.name, self._served.policy)
        return self._card()

    async def _models(self, request: Request) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def _health(self, request: Request) -> dict[str, Any]:
        return {"status": "ok"}

    def _card(self) -> dict[str, Any]:
        served = self._served
        return {
            "id": served.name,
            "object": "model",
            "owned_by": "shoal",
            "max_model_len": served.room,
            "weight_version": served.policy,
            "vocabulary": served.vocabulary,
        }

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread once all that came before is done."""
        self._waiting += 1
        try:
            async with self._turn:
                # Given up only when serving ends: `work` then sees that its client is gone.
                return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
        finally:
            self._waiting -= 1


def _names_this_machine(request: Request) -> bool:
    """True if the engine was asked for under a name that nobody else can point here."""
    try:
        return is_loopback(urlsplit(f"//{request.headers.get('host', '')}").hostname or "")
    except ValueError:
        return False


async def _body(request: Request) -> bytes:
    """The body of a request. Raises Refused where it is too large, or slow."""
    body = bytearray()
    with trio.move_on_after(BODY_DEADLINE_S) as scope:
        try:
            async for part in request.stream():
                body += part
                if len(body) > BODY_LIMIT_BYTES:
                    raise Refused(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has {BODY_LIMIT_BYTES} bytes at most"
                    )
        except ClientDisconnect:
            raise Refused(HTTPStatus.BAD_REQUEST, "half a request") from None
    if scope.cancelled_caught:
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"a request comes within {BODY_DEADLINE_S:g} s")
    return bytes(body)


def decoded(body: bytes, kind: type[T]) -> T:
    """Read a request's body. Raises Refused."""
    try:
        return decode_json(msgspec.json.Decoder(kind), body)
    except ValueError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None


async def serve_model(
    folder: Path, listening: socket.socket, *, version: int, device: str, ready: Callable[[Served], None]
) -> None:
    """Load the model in `folder` and serve it until cancelled; `ready` is called once it is. Raises ConfigError."""
    chosen = pick_device(device)
    served = await trio.to_thread.run_sync(lambda: load(folder, version=version, device=chosen))
    server = CompletionServer(served, device=chosen, loopback=is_loopback(listening.getsockname()[0]))
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda *, task_status: server.run(listening, task_status=task_status))
        ready(served)
