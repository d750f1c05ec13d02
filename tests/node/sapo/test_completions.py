"""Replies of engines as they are written down, and what is not believed of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.sapo.completions import CompletionsRequest, read_reply, refusal_in, version_of
from shoal.protocol.errors import RemoteError

REQUEST = CompletionsRequest(
    prompt="1+2=", max_tokens=4, temperature=1.0, top_p=1.0, seed=7, n=2, logprobs=1, return_token_ids=True
)

VLLM: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1764163200,
    "model": "org/model",
    "choices": [
        {
            "index": 0,
            "text": " 3",
            "logprobs": {
                "text_offset": [0, 2],
                "token_logprobs": [-0.25, -1.5],
                "tokens": [" 3", "</s>"],
                "top_logprobs": [{" 3": -0.25, " 4": -2.0}, {"</s>": -1.5}],
            },
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [513, 2],
            "prompt_logprobs": None,
            "prompt_token_ids": [1, 29],
            "routed_experts": None,
        },
        {
            "index": 1,
            "text": " 3 4",
            "logprobs": {
                "text_offset": [0, 2, 3, 4],
                "token_logprobs": [-0.25, -0.5, -0.75, -1.0],
                "tokens": [" 3", " ", "4", " "],
                "top_logprobs": [None, None, None, None],
            },
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [513, 9, 14, 9],
        },
    ],
    "service_tier": None,
    "system_fingerprint": None,
    "usage": {"prompt_tokens": 2, "total_tokens": 8, "completion_tokens": 6, "prompt_tokens_details": None},
    "kv_transfer_params": None,
}
"""Fields and shapes as of vllm/entrypoints/openai/completion/protocol.py (CompletionResponse)."""

SGLANG = {
    **{key: VLLM[key] for key in ("id", "object", "created", "usage")},
    "model": "default",
    "choices": [
        {
            **{key: value for key, value in choice.items() if key in ("index", "text", "logprobs", "token_ids")},
            "finish_reason": choice["finish_reason"],
            "matched_stop": 2 if choice["finish_reason"] == "stop" else None,
        }
        for choice in VLLM["choices"]
    ],
    "metadata": {"weight_version": "12"},
}
"""As of sglang/srt/entrypoints/openai: protocol.py (CompletionResponse), serving_completions.py (metadata)."""

TRANSFORMERS = {
    "id": "6f1c",
    "choices": [{"finish_reason": "length", "index": 0, "text": "3 4 "}],
    "created": 1764163200,
    "model": "/models/tiny",
    "object": "text_completion",
    "usage": {"completion_tokens": 4, "prompt_tokens": 2, "total_tokens": 6},
}
"""As of transformers/cli/serving/completion.py, 5.23: n and logprobs are not looked at; what is None is left out."""


def _of_llama_cpp(id: int, token: str, log_prob: float) -> dict[str, Any]:
    rival = {"id": 4, "token": "2", "bytes": [50], "logprob": -1.5905805826187134}
    return {"id": id, "token": token, "bytes": [*token.encode()], "logprob": log_prob, "top_logprobs": [rival]}


LLAMA_CPP: dict[str, Any] = {
    "choices": [
        {"text": text, "index": at, "logprobs": {"content": content}, "finish_reason": reason}
        for at, (text, content, reason) in enumerate(
            [
                ("?", [_of_llama_cpp(0, "?", -1.8602796792984009), _of_llama_cpp(1, "", -3.173588752746582)], "stop"),
                (
                    "03?0",
                    [
                        _of_llama_cpp(2, "0", -1.851815104484558),
                        _of_llama_cpp(5, "3", -2.209406852722168),
                        _of_llama_cpp(0, "?", -1.6599043607711792),
                        _of_llama_cpp(2, "0", -1.2681866884231567),
                    ],
                    "length",
                ),
            ]
        )
    ],
    "created": 1796042984,
    "model": "one.gguf",
    "system_fingerprint": "b1-0c1e570",
    "object": "text_completion",
    "usage": {
        "completion_tokens": 2,
        "prompt_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
    "id": "chatcmpl-wdgZnElLZqq0FHCbnnUwIkajjEINrV8n",
    "timings": {"cache_n": 0, "prompt_n": 1, "prompt_ms": 0.579, "predicted_n": 1, "predicted_ms": 0.001},
}
"""Of the server in llama-cpp-python 0.3.36. Of several completions it counts the first one's tokens."""


def encoded(reply: object) -> bytes:
    return json.dumps(reply).encode()


@pytest.mark.parametrize(("reply", "policy", "version"), [(VLLM, "org/model", 0), (SGLANG, "12", 12)])
def test_log_probabilities_and_tokens_are_those_of_the_drawn_tokens(reply: object, policy: str, version: int) -> None:
    read = read_reply(encoded(reply), REQUEST)
    assert (read.policy, version_of(read.policy), read.tokens) == (policy, version, 6)
    assert [one.text for one in read.completions] == [" 3", " 3 4"]
    drawn = [one.drawn for one in read.completions if one.drawn is not None]
    assert [one.values() for one in drawn] == [(-0.25, -1.5), (-0.25, -0.5, -0.75, -1.0)]
    assert [one.ids() for one in drawn] == [(513, 2), (513, 9, 14, 9)]


def test_log_probabilities_in_the_form_of_chats_are_read_with_their_tokens() -> None:
    read = read_reply(encoded(LLAMA_CPP), REQUEST)
    assert (read.policy, version_of(read.policy), read.tokens) == ("one.gguf b1-0c1e570", 0, 6), "it says two"
    drawn = [one.drawn for one in read.completions if one.drawn is not None]
    assert [(one.text, one.cut) for one in read.completions] == [("?", False), ("03?0", True)]
    assert [one.ids() for one in drawn] == [(0, 1), (2, 5, 0, 2)]
    given = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in LLAMA_CPP["choices"]]
    assert [one.values() for one in drawn] == [tuple(map(float, np.float32(values))) for values in given]


@pytest.mark.parametrize(
    ("text", "reason", "left_out", "temperature", "is_drafted"),
    [
        ("03é0", "length", 0, 1.0, False),  # its é may be of two tokens, of which one is in the list
        ("03?", "length", 1, 1.0, False),  # the last may be of a character that did not come to its end
        ("03?0", "length", 0, 0.7, False),  # the log-probabilities are at 1
        ("03?0", "length", 0, 1.0, True),  # another model drew it, and it says that it was certain
    ],
)
def test_log_probabilities_of_llama_cpp_are_left_where_they_are_not_sure(
    text: str, reason: str, left_out: int, temperature: float, is_drafted: bool
) -> None:
    (choice,) = LLAMA_CPP["choices"][1:]
    content = choice["logprobs"]["content"]
    content = content[: len(content) - left_out]
    if is_drafted:
        content = [*content[:-1], {**content[-1], "logprob": 0.0, "top_logprobs": []}]
    changed = {**choice, "text": text, "logprobs": {"content": content}, "finish_reason": reason}
    request = msgspec.structs.replace(REQUEST, temperature=temperature)
    (read,) = read_reply(encoded({**LLAMA_CPP, "choices": [changed]}), request).completions
    assert (read.text, read.drawn) == (text, None)


def test_reply_without_log_probabilities_has_text_and_says_that_it_has_no_more() -> None:
    read = read_reply(encoded(TRANSFORMERS), REQUEST)
    assert read.policy == "/models/tiny"
    assert [(one.text, one.drawn) for one in read.completions] == [("3 4 ", None)]


def test_what_is_asked_has_the_names_of_the_api_and_in_its_plain_form_nothing_but_what_all_know() -> None:
    whole = {"prompt": "1+2=", "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "seed": 7}
    assert json.loads(msgspec.json.encode(REQUEST)) == {**whole, "n": 2, "logprobs": 1, "return_token_ids": True}
    assert json.loads(msgspec.json.encode(REQUEST.plain())) == whole


def changed(**fields: object) -> bytes:
    """vLLM's reply with another first choice."""
    first, second = VLLM["choices"]
    return encoded({**VLLM, "choices": [{**first, **fields}, second]})


def of_log_probs(*values: object) -> bytes:
    return changed(logprobs={"token_logprobs": values})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "none of the completions API"),
        (b"{", "none of the completions API"),
        (encoded(VLLM).replace(b"org/model", b"org\xff"), "not UTF-8"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "none of the completions API"),
        (b'{"choices": []}', "none of the completions API"),
        (b"[]", "none of the completions API"),
        (encoded(VLLM)[:-40], "none of the completions API"),
        (encoded({**VLLM, "choices": VLLM["choices"] * 2}), "4 completions where 2 were asked for"),
        (encoded({**VLLM, "model": "m" * 129}), "no line that can be kept"),
        (encoded({**VLLM, "model": "a\nb"}), "no line that can be kept"),
        (encoded({**VLLM, "metadata": {"weight_version": 3}}), "none of the completions API"),
        (changed(text=None), "none of the completions API"),
        (changed(text=3), "none of the completions API"),
        (changed(finish_reason=None), "not finished, but ended by None"),
        (changed(finish_reason="abort"), "not finished, but ended by 'abort'"),
        (changed(finish_reason="content_filter"), "not finished"),
        (of_log_probs(-0.5, None), "a log-probability is missing"),
        (of_log_probs(-0.5, 0.5), "a log-probability that is not finite, or above 0"),
        (of_log_probs(-0.5, 0.001), "a log-probability that is not finite, or above 0"),
        (of_log_probs(-0.5, "-0.5"), "none of the completions API"),
        (changed().replace(b"-0.25", b"NaN", 1), "none of the completions API"),
        (changed().replace(b"-0.25", b"-1e999", 1), "none of the completions API"),
        (of_log_probs(-0.5, -1e300), "does not fit 32 bits"),
        (of_log_probs(*[-0.5] * 5), "5 tokens where 4 were the most"),
        (changed(token_ids=[513]), "1 tokens and 2 log-probabilities"),
        (changed(token_ids=[513, -2]), "not in the vocabulary"),
        (changed(token_ids=[513, 2**32]), "not in the vocabulary"),
        (encoded({**VLLM, "metadata": {"weight_version": "3", "vocabulary": 513}}), "not in the vocabulary"),
        (encoded(LLAMA_CPP).replace(b'"logprob": -1.86', b'"other": -1.86', 1), "a log-probability is missing"),
        (encoded(LLAMA_CPP).replace(b'"id": 0', b'"no": 0', 1), "1 tokens and 2 log-probabilities"),
        (encoded(LLAMA_CPP).replace(b'"id": 0', b'"id": -1', 1), "not in the vocabulary"),
    ],
)
def test_reply_that_is_none_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(RemoteError, match=why):
        read_reply(body, REQUEST)


@given(st.data())
def test_reply_with_anything_anywhere_is_read_or_refused_and_nothing_else_happens(data: st.DataObject) -> None:
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )
    reply: Any = json.loads(encoded(data.draw(st.sampled_from([VLLM, LLAMA_CPP]))))
    log_probs = reply["choices"][1]["logprobs"]
    place: Any = data.draw(st.sampled_from([reply, reply["choices"][0], log_probs, *log_probs.get("content", [])]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(anything)
    try:
        read = read_reply(encoded(reply), REQUEST)
    except RemoteError:
        return
    assert 1 <= len(read.completions) <= 2
    for one in read.completions:
        assert isinstance(one.text, str)
        assert one.drawn is None or len(one.drawn.ids()) in (0, len(one.drawn.values()))


@pytest.mark.parametrize(
    ("policy", "version"),
    [("7-3f2a9c0011223344", 7), ("12", 12), ("0", 0), ("default", 0), ("7b", 0), ("v7", 0), ("9" * 19, 0), ("", 0)],
)
def test_version_is_the_number_in_a_policy_s_name(policy: str, version: int) -> None:
    assert version_of(policy) == version


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "too\\nlong"}}', "too long"),
        (b'{"error": {"message": ["too long"]}}', ""),
        (b'{"error": "too long"}', "too long"),
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"detail": "Unexpected fields in the request: x"}', "Unexpected fields in the request: x"),
        (b"<html>", ""),
        (b"\xff", ""),
        (b'{"error": "\xff"}', ""),
        (b'{"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    ],
)
def test_refusal_is_told_in_the_engine_s_words(body: bytes, said: str) -> None:
    assert refusal_in(body) == said
