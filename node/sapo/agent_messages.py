"""The messages between a node's daemon and its agent process, framed as on every pipe (`shoal.node.pipe`).

The daemon has the network and no model, the agent the model, the tasks and the scorers, and no keys. Which groups are
pulled follows from announcements, so the daemon chooses. What has come from peers, groups whose hashes it has checked,
it passes on as it is; the agent alone opens and scores them, and the daemon keeps account of what it finds.

    daemon                                          agent
    Begin ────────────────────────────────────────►      builds or restores its policy
          ◄──────────────────────────────────────── Teaching  how far a policy that is warmed up is
          ◄──────────────────────────────────────── Ready
          ◄──────────────────────────────────────── Made    a group of its own, to be announced
          ◄──────────────────────────────────────── Asked   and what its completions answer
          ◄──────────────────────────────────────── Take    so many groups of others, please
    Pulled … Pulled, Delivered ───────────────────►      those that came, one by one
          ◄──────────────────────────────────────── Asked   what each of them answers, as far as it was opened
          ◄──────────────────────────────────────── Judged  what each of them is worth
          ◄──────────────────────────────────────── RoundReport  of the round; Made again, and so on
          ◄──────────────────────────────────────── Probed  the policy on held-out tasks, every so many rounds
          ◄──────────────────────────────────────── Waiting for an engine, if it has one
    Pause, Resume, Stop at any time

The daemon answers a `Judged` with a refusal in it by what it has in place of the refused groups, `Pulled … Delivered`
again, which may be none; there is no answer to any other. A frame holds at most one group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta

from shoal.node.pipe import SUMMARY_LIMIT_CHARS, Failed, Message, Pause, Resume, Stop, unpacker
from shoal.node.sapo.selection import Reward, Verdict
from shoal.node.sapo.tasks import CHOICE_LIMIT, QUESTION_LIMIT_CHARS, TaskKind
from shoal.node.training.trainer_messages import Scalar
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest_rollouts import GROUPS_LIMIT, RolloutsSection
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import COMPLETION_LIMIT, GROUP_LIMIT_BYTES, Announcement
from shoal.protocol.wire import HASH_BYTES, SwarmId

WAIT_LIMIT_S = 60.0
POLICIES_LIMIT = 16

Role = Literal["train", "sample", "judge"]
"""train: generate, share, and train. sample: generate and share only. judge: take others' groups, and score them."""

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
GroupBytes = Annotated[bytes, Meta(min_length=1, max_length=GROUP_LIMIT_BYTES)]


# --- from the daemon ---


class Begin(Message, frozen=True, kw_only=True):
    """Be the agent of this node. It goes on from its newest file in `folder`, or else begins.

    rollouts: the swarm's section, in which local, external and group_size may be this node's own. announced: rounds
    below this one have been announced and are not made again. rounds: how many to make, None for no end. averages: the
    node's data folder, where the agent is to attach as the training loop of a node that averages policies. engine: host
    and port of the engine that draws a sampler's groups, which then has no policy.
    evaluate_rounds: a trainer's policy is evaluated after so many rounds, 0 for never.
    """

    policy: str
    options: dict[str, Scalar]
    seed: int
    swarm_id: Annotated[SwarmId, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    me: PeerId
    folder: str
    role: Role
    rollouts: RolloutsSection
    learning_rate: float
    optimizer: str = "adamw"
    clip_norm: float
    device: str
    data: str | None = None
    threads: int
    announced: Count = 0
    rounds: int | None = None
    averages: str | None = None
    engine: tuple[str, int] | None = None
    evaluate_rounds: Count = 0


class Pulled(Message, frozen=True, kw_only=True):
    """One of the groups that the daemon chose, and its announcement; the hash is checked.

    replay: whether its tokens are to be gone through again.
    """

    offer: Offer
    group: GroupBytes
    replay: bool = False


class Delivered(Message, frozen=True, kw_only=True):
    """The end of a delivery: of what was asked for, no more came."""


Order = Begin | Pulled | Delivered | Pause | Resume | Stop


# --- from the agent ---


class Teaching(Message, frozen=True, kw_only=True):
    """Progress of the warm-up: `done` of at most `limit` updates are made; it ends sooner at the reward `wanted`.

    reward: as it was measured last, None before. left_s: until the limit at this pace, None while none is known.
    """

    done: Count
    limit: Count
    reward: Reward | None = None
    wanted: Reward
    left_s: Annotated[float, Meta(ge=0)] | None = None


class Ready(Message, frozen=True, kw_only=True):
    """The policy is built. round: the next one; restored: of which round the file was that it goes on from.

    refused: why newer files were not used, a clause each. reward: after a warm-up, the reward that it ended with.
    tasks: what the swarm draws from; scorable: families for which it can score others' text.
    """

    round: Count
    restored: Count | None = None
    refused: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)] = ""
    reward: Reward | None = None
    tasks: Annotated[tuple[TaskKind, ...], Meta(min_length=1, max_length=CHOICE_LIMIT)]
    scorable: Annotated[tuple[str, ...], Meta(max_length=CHOICE_LIMIT)]


class Made(Message, frozen=True, kw_only=True):
    """A group of this node's own, in the encoding that travels, its announcement, and what its completions earned."""

    announcement: Announcement
    group: GroupBytes
    rewards: Annotated[tuple[Reward, ...], Meta(max_length=COMPLETION_LIMIT)]


class Asked(Message, frozen=True, kw_only=True):
    """The question whose answers are in a group, made from its task by the agent: for people to read."""

    digest: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    question: Annotated[str, Meta(max_length=QUESTION_LIMIT_CHARS)]


class Take(Message, frozen=True, kw_only=True):
    """A request for others' groups. wait_s: how long to wait for something to be there.

    limit_s: how long to wait for the groups themselves, and for those in place of refused ones; None for as long as the
    daemon does. policies: the versions of which groups are wanted, None for all.
    """

    count: Annotated[int, Meta(ge=1, le=GROUPS_LIMIT)]
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_LIMIT_S)] = 0.0
    limit_s: Annotated[float, Meta(ge=0, le=WAIT_LIMIT_S)] | None = None
    policies: Annotated[tuple[Count, ...], Meta(max_length=POLICIES_LIMIT)] | None = None


class Judged(Message, frozen=True, kw_only=True):
    """The verdicts on the groups of a delivery, in their order."""

    verdicts: Annotated[tuple[Verdict, ...], Meta(min_length=1, max_length=GROUPS_LIMIT)]


class RoundReport(Message, frozen=True, kw_only=True):
    """The end of a round.

    reward: mean over the completions that it generated itself and finished in this round, None where none was scored.
    local, external: groups trained on, its own as far as they were scored in time; informative: those of them whose
    rewards vary. generated_tokens: all that were drawn, also for groups that go on. unencodable: accepted groups that
    its policy cannot express.

    By the figures after `seconds` a collapse is seen; None where nothing was drawn by its policy, or trained on.
    entropy: in nats a token, estimated by the mean of -log p of those drawn. length: tokens of a completion, mean.
    distinct: completions that no other of their group equals, and one of those that do, as a share of all.
    gradient_norm, clipped: see `Update`.
    """

    round: Count
    reward: Reward | None = None
    local: Count = 0
    external: Count = 0
    informative: Count = 0
    generated_tokens: Count = 0
    unencodable: Count = 0
    seconds: float = 0.0
    entropy: float | None = None
    length: float | None = None
    distinct: float | None = None
    gradient_norm: float | None = None
    clipped: float | None = None


class Probed(Message, frozen=True, kw_only=True):
    """The greedy reward of the policy after `round` rounds on held-out tasks, in all and by family.

    tasks: that were scored in time. seconds: what it took.
    """

    round: Count
    reward: Reward
    by_family: Annotated[dict[str, Reward], Meta(max_length=CHOICE_LIMIT)]
    tasks: Count
    seconds: float


class Waiting(Message, frozen=True, kw_only=True):
    """The reason why a sampler's engine gave nothing this time; it tries again."""

    reason: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)]


class Saved(Message, frozen=True, kw_only=True):
    """Policy and optimizer are on disk, with `round` as the next round, unless `failure` says why not."""

    round: Count
    failure: Annotated[str, Meta(max_length=SUMMARY_LIMIT_CHARS)] = ""


class Finished(Message, frozen=True, kw_only=True):
    """All rounds that were to be made are made, and saved."""


AgentReport = (
    Teaching | Ready | Made | Asked | Take | Judged | RoundReport | Probed | Waiting | Saved | Finished | Failed
)

unpack_order: Callable[[bytes], Order] = unpacker(Order, "an order between daemon and agent")
unpack_agent_report: Callable[[bytes], AgentReport] = unpacker(AgentReport, "a report between daemon and agent")
