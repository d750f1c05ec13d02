"""The section [audit] of a manifest: how much of a round is recomputed, and how long who is proven to lie stays out."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shoal.protocol.wire import Message


class AuditSection(Message, frozen=True, kw_only=True):
    """Audits of owners' sums, and bans. A manifest without the section has these values."""

    chunks: Annotated[
        int,
        Meta(ge=0, le=1024, description="Chunks of every round that each node recomputes, drawn anew; 0 for none."),
    ] = 2
    share: Annotated[
        float,
        Meta(gt=0, le=1, description="Of a node's time, at most so much is spent on that, and on fetching for it."),
    ] = 0.05
    ban_rounds: Annotated[
        int,
        Meta(ge=0, le=2**53, description="For how many rounds who is proven to have lied is out; 0 is for ever."),
    ] = 0
    work: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Of the rounds, in so many a node weighs what one member's work does to the loss on the data "
            "assigned to that member; 0 for none. It fetches that whole contribution, and takes some forward passes.",
        ),
    ] = 0.0
