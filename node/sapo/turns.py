"""Draws a dialogue turn by turn, and reads one that somebody else drew.

All of a dialogue is one completion. A turn ends with the policy's end token; what the environment answers comes in as
tokens that were *given* (`Policy.encode_reply`), which count for the completion's limit and for no gradient. A task of
one turn is a dialogue whose environment says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.node.sapo.dialogue import alternate, as_said, transcript, turns_in
from shoal.node.sapo.policy import Policy, Rollout, Sample, Span
from shoal.node.sapo.tasks import Task

Dialogue = tuple[Task, Rollout]
"""A task, and a completion of it in the making."""


def begun(policy: Policy, task: Task) -> Rollout:
    """Return a completion of `task` of which nothing is drawn yet."""
    return Rollout(prompt=policy.encode_prompt(task.question), open=task.answering is not None)


def extend_dialogues(
    policy: Policy,
    dialogues: Sequence[Dialogue],
    *,
    version: int = 0,
    enough: Callable[[], bool] = lambda: False,
) -> int:
    """Have the policy draw turns and environments answer, until all are over or `enough()`. Returns tokens drawn.

    Those that were answered wait until they are as many as are still in their turn, and then go on together. None is
    left whose turn ended and was not answered. version: of the policy.
    """
    drawn = 0
    while not enough():
        going = [rollout for _, rollout in dialogues if not rollout.done]
        answered: list[Rollout] = []

        def pause(going: list[Rollout] = going, answered: list[Rollout] = answered) -> bool:
            """Have environments answer; true if the others need not go on without those that were answered."""
            ended = [(task, rollout) for task, rollout in dialogues if rollout.done and rollout.open]
            answered += [rollout for task, rollout in ended if answer(policy, task, rollout)]
            return enough() or 0 < sum(not rollout.done for rollout in going) <= 2 * len(answered)

        if going:
            drawn += policy.extend(going, enough=pause)
        pause()
        for rollout in going:
            rollout.note_version(version)
        if all(rollout.done for _, rollout in dialogues):
            break
    return drawn


def answer(policy: Policy, task: Task, rollout: Rollout) -> bool:
    """Have the environment of a dialogue answer the turn that ended; False, and the dialogue over, if it does not.

    It is also over where the limit leaves the next turn no room.
    """
    reply = None
    if task.answering is not None and len(rollout.tokens) < policy.completion_limit:
        reply = task.answering(said_in(policy, task, rollout))
    tokens = () if reply is None else policy.encode_reply(reply)
    start = len(rollout.tokens)
    if reply is None or start + len(tokens) >= policy.completion_limit:
        rollout.open = False
        return False
    rollout.tokens += tokens
    rollout.log_probs += [0.0] * len(tokens)
    rollout.given.append((start, len(rollout.tokens)))
    rollout.replies.append(reply)
    rollout.done = False
    return True


def said_in(policy: Policy, task: Task, rollout: Rollout) -> tuple[str, ...]:
    """Return what the policy said in each of its turns."""
    starts = [0, *(stop for _, stop in rollout.given)]
    stops = [*(start for start, _ in rollout.given), len(rollout.tokens)]
    return tuple(_said(policy, task, rollout.tokens[start:stop]) for start, stop in zip(starts, stops, strict=True))


def text_of(policy: Policy, task: Task, rollout: Rollout) -> str:
    """Return the completion's text: of a dialogue its transcript."""
    return transcript(said_in(policy, task, rollout), rollout.replies)


def encoded(policy: Policy, task: Task, text: str) -> Sample | None:
    """Return somebody else's completion in the policy's tokens; None if these cannot express what was said."""
    prompt, parts = policy.encode_prompt(task.question), _parts(task, text)
    if parts is None:
        return None
    said, replies = parts
    completion: list[int] = []
    given: list[Span] = []
    for at, turn in enumerate(said):
        tokens = policy.encode_completion(turn)
        if tokens is None:
            return None
        completion += tokens
        if len(completion) >= policy.completion_limit:
            break
        if at < len(replies):
            start = len(completion)
            completion += policy.encode_reply(replies[at])
            given.append((start, min(len(completion), policy.completion_limit)))
    return Sample(prompt=prompt, completion=tuple(completion[: policy.completion_limit]), given=tuple(given))


def context_of(policy: Policy, task: Task, said: Sequence[str], replies: Sequence[str]) -> tuple[int, ...] | None:
    """Return the tokens after which the next turn comes; None if the policy's cannot express what was said.

    said, replies: as many.
    """
    tokens = [*policy.encode_prompt(task.question)]
    for turn, reply in zip(said, replies, strict=True):
        spoken = policy.encode_completion(turn)
        if spoken is None:
            return None
        tokens += (*spoken, *policy.encode_reply(reply))
    return tuple(tokens)


def given_in(policy: Policy, task: Task, text: str, tokens: Sequence[int], *, end: int) -> tuple[Span, ...] | None:
    """Return the spans of a stranger's tokens that its environment gave; None if they are not those of `text`.

    The tokens are below the policy's vocabulary. The last turn goes on to the end token, or to the limit; that its
    environment had nothing more to answer is not asked.
    """
    parts = _parts(task, text)
    if parts is None:
        return None
    said, replies = parts
    given: list[Span] = []
    at = 0
    for number, turn in enumerate(said):
        stop = next((place + 1 for place in range(at, len(tokens)) if tokens[place] == end), len(tokens))
        drawn = tokens[at:stop]
        if not drawn or _said(policy, task, drawn) != turn:
            return None
        if number == len(said) - 1:
            whole = drawn[-1] == end or len(tokens) == policy.completion_limit
            return tuple(given) if stop == len(tokens) and whole else None
        reply = policy.encode_reply(replies[number])
        at = stop + len(reply)
        if drawn[-1] != end or tuple(tokens[stop:at]) != reply:
            return None
        given.append((stop, at))
    return None


def _said(policy: Policy, task: Task, tokens: Sequence[int]) -> str:
    text = policy.decode(tokens)
    return text if task.answering is None else as_said(text)


def _parts(task: Task, text: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the turns and the answers of a text; None for one that is no transcript."""
    if task.answering is None:
        return (text,), ()
    said, replies = turns_in(text)
    return (said, replies) if alternate(said, replies) else None
