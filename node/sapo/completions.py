"""OpenAI's completions, as engines speak them: what is asked of one, and what may be believed of its reply.

An engine is the user's own choice, and yet what it answers is checked like anything received: a reply that is cut off,
of other numbers of things, or of numbers that are none, is no reply. What is read of it, and who gives it:

    choices[].text, .finish_reason            all. Only "stop" and "length" are ends; a completion that was aborted,
                                              or has no reason to have ended, is not finished
    choices[].logprobs.token_logprobs         all but `transformers serve`, which ignores the wish (5.23)
    choices[].token_ids                       vLLM, SGLang and `shoal engine`, on `return_token_ids`
    choices[].logprobs.content[].logprob, .id  llama.cpp's server, as in chats: at temperature 1 whatever was asked,
                                              without a token that ends in the midst of a character, and 0 for one
                                              that a draft model drew
    metadata.weight_version                   SGLang and `shoal engine`: the policy that drew this very reply
    metadata.vocabulary                       `shoal engine`: its tokens are below it
    model, system_fingerprint                 vLLM and others: they name the policy where nothing better does

Sources: https://platform.openai.com/docs/api-reference/completions; `vllm/entrypoints/openai/completion/protocol.py` of
vLLM; `entrypoints/openai/protocol.py` and `serving_completions.py` of SGLang; `server-task.cpp` of llama.cpp;
`cli/serving/completion.py` of transformers 5.23. No IO, and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from shoal.protocol.errors import RemoteError
from shoal.protocol.rollouts import COMPLETION_LIMIT, POLICY_LIMIT_CHARS, Drawn

TOKEN_REPLY_BYTES = 512
"""Of a reply, for each token: its text, its log-probability, those of its rival, and where it stands."""
REPLY_BASE_BYTES = 64 << 10
REPLY_LIMIT_BYTES = 64 << 20
"""Of a reply with more than one completion: more of them are asked for in several requests."""
TOKEN_IDS = 2**32
"""Tokens are below it, whatever the vocabulary."""
REFUSAL_LIMIT_CHARS = 200
CUT = "length"
ENDS = ("stop", CUT)
"""The reasons for which a completion is finished."""
TOKEN_CHARS = 4
"""Characters of a token, where nobody says how many tokens a text is."""

Prompt = str | tuple[int, ...]
"""A text, or its tokens, which engines take too."""

T = TypeVar("T")

_VERSION = re.compile(r"(\d{1,18})(?:-|\Z)", re.ASCII)


class CompletionsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`n` completions of `prompt`. logprobs 1 is the one number that all engines take as a wish for the drawn token's.

    top_p: 1, said so that an engine does not take the one that lies beside its model. No model is named: an
    engine that a node samples from serves one.
    """

    prompt: Prompt
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    n: int = 1
    logprobs: int | None = None
    return_token_ids: bool = False

    def single(self) -> CompletionsRequest:
        """One completion, for an engine that draws no more at a time."""
        return msgspec.structs.replace(self, n=1)

    def plain(self) -> CompletionsRequest:
        """One completion, with nothing that an engine might not know."""
        return msgspec.structs.replace(self, n=1, logprobs=None, return_token_ids=False)

    @property
    def reply_limit_bytes(self) -> int:
        """The most that a reply to it may take."""
        return REPLY_BASE_BYTES + TOKEN_REPLY_BYTES * self.n * self.max_tokens


def together(max_tokens: int) -> int:
    """The most completions of so many tokens that one reply may have."""
    return max(1, (REPLY_LIMIT_BYTES - REPLY_BASE_BYTES) // (TOKEN_REPLY_BYTES * max_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished completion. drawn: None from an engine that gives no log-probabilities. cut: the limit ended it."""

    text: str
    drawn: Drawn | None
    cut: bool = False

    @property
    def least_tokens(self) -> int:
        """How many tokens it has, or may be taken to have where the engine does not say."""
        return len(self.text) // TOKEN_CHARS + 1 if self.drawn is None else len(self.drawn.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Completions that one policy drew, of a reply or a group. policy: as the engine names it.

    tokens: how many, as far as it says, and at least those in `drawn`.
    """

    policy: str
    completions: tuple[Completion, ...]
    tokens: int


class _Token(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float | None = None
    id: int | None = None
    top_logprobs: list[msgspec.Raw] | None = None


class _LogProbs(msgspec.Struct, frozen=True, kw_only=True):
    token_logprobs: list[float | None] | None = None
    content: list[_Token] | None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    completion_tokens: int | None = None


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    weight_version: str | None = None
    vocabulary: Annotated[int, Meta(ge=1, le=TOKEN_IDS)] | None = None


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=COMPLETION_LIMIT)]
    model: str = ""
    system_fingerprint: str | None = None
    usage: _Usage | None = None
    metadata: _Metadata | None = None


_REPLIES = msgspec.json.Decoder(_Reply)
_ANSWERS = msgspec.json.Decoder(dict[str, object])


def decode_json(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode what somebody else wrote. Raises ValueError, whatever it is."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:  # a ValidationError is one
        raise ValueError(str(error)) from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None


def read_reply(body: bytes, request: CompletionsRequest) -> Reply:
    """Read what an engine answered to `request`. Raises RemoteError for anything but finished completions."""
    try:
        reply = decode_json(_REPLIES, body)
    except ValueError as error:
        raise RemoteError(f"its reply is none of the completions API: {error}") from None
    if len(reply.choices) > request.n:
        raise RemoteError(f"it gave {len(reply.choices)} completions where {request.n} were asked for")
    vocabulary = TOKEN_IDS if reply.metadata is None else reply.metadata.vocabulary or TOKEN_IDS
    completions = tuple(_completion(choice, request, vocabulary) for choice in reply.choices)
    used = reply.usage.completion_tokens if reply.usage is not None else None
    most = len(completions) * request.max_tokens
    drawn = sum(len(one.drawn.values()) for one in completions if one.drawn is not None)
    return Reply(policy=_policy(reply), completions=completions, tokens=max(drawn, min(used or 0, most)))


def version_of(policy: str) -> int:
    """The number of a policy that has one in its name, such as 7 or 7-3f2a…; 0 for any other."""
    match = _VERSION.match(policy)
    return int(match[1]) if match else 0


def loaded_in(body: bytes) -> str:
    """The policy that an engine says it has loaded. Raises RemoteError for an answer that names none."""
    try:
        policy = decode_json(_ANSWERS, body).get("weight_version")
    except ValueError as error:
        raise RemoteError(f"its answer is none: {error}") from None
    if not isinstance(policy, str) or not 0 < len(policy) <= POLICY_LIMIT_CHARS or not policy.isprintable():
        raise RemoteError("it does not say which policy it has loaded")
    return policy


def refusal_in(body: bytes) -> str:
    """Answer of an engine to a request that it refused, in one short line; empty if it said nothing."""
    try:
        answer = decode_json(_ANSWERS, body)
    except ValueError:
        return ""
    said = next((answer[key] for key in ("error", "message", "detail") if answer.get(key)), "")
    if isinstance(said, dict):
        said = said.get("message", "")
    return " ".join(said.split())[:REFUSAL_LIMIT_CHARS] if isinstance(said, str) else ""


def _policy(reply: _Reply) -> str:
    name = " ".join(part for part in (reply.model, reply.system_fingerprint or "") if part)
    if reply.metadata is not None and reply.metadata.weight_version:
        name = reply.metadata.weight_version
    if len(name) > POLICY_LIMIT_CHARS or not name.isprintable():
        raise RemoteError("it names its policy in no line that can be kept")
    return name or "unnamed"


def _drawn(choice: _Choice, request: CompletionsRequest) -> tuple[Sequence[float | None], Sequence[int]]:
    """Log-probabilities and tokens, in whichever form they are; what is not said, or not sure, is empty."""
    if choice.logprobs is None:
        return (), ()
    content = choice.logprobs.content
    if not content:
        return choice.logprobs.token_logprobs or (), choice.token_ids or ()
    is_whole = choice.text.isascii() and (choice.finish_reason != CUT or len(content) >= request.max_tokens)
    is_drafted = any(token.top_logprobs == [] for token in content)  # by another model, and has no probabilities
    if not is_whole or is_drafted or request.temperature != 1:
        return (), ()
    return [token.logprob for token in content], [token.id for token in content if token.id is not None]


def _completion(choice: _Choice, request: CompletionsRequest, vocabulary: int) -> Completion:
    if choice.finish_reason not in ENDS:
        raise RemoteError(f"a completion is not finished, but ended by {choice.finish_reason!r:.40}")
    cut = choice.finish_reason == CUT
    log_probs, tokens = _drawn(choice, request)
    if not log_probs:
        return Completion(text=choice.text, drawn=None, cut=cut)
    if len(log_probs) > request.max_tokens:
        raise RemoteError(f"a completion has {len(log_probs)} tokens where {request.max_tokens} were the most")
    known = [value for value in log_probs if value is not None]
    if len(known) < len(log_probs):
        raise RemoteError("a log-probability is missing")
    if len(tokens) not in (0, len(log_probs)):
        raise RemoteError(f"a completion has {len(tokens)} tokens and {len(log_probs)} log-probabilities")
    if not all(0 <= token < vocabulary for token in tokens):
        raise RemoteError("a token is not in the vocabulary")
    try:
        return Completion(text=choice.text, drawn=Drawn.of(known, tokens), cut=cut)
    except OverflowError:
        raise RemoteError("a log-probability does not fit 32 bits") from None
    except ValueError as error:  # checked there alone, in the precision in which they are kept
        raise RemoteError(f"a completion has {error}") from None
