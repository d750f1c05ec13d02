"""Where members of different views meet again, so that none of them waits for what another can never give.

A member that moved ahead votes in no lower view. Where the others are a quorum without it they go on, and it hears of
the certificate. Where they are not, their view decides nothing: no plan of its lead, whatever the attempt, is reported
by everyone that is needed. It happens to whose link to the lead comes up late (following.py): for a while it sees a
quorum without a lead. Then others leave or die, and it is needed.

So each member looks for the lowest view, from its own on, in which those who live and have not promised more are a
quorum. Every member that knows the same promises finds the same view; who stands highest of those that are needed is
in it already. Moving there is a promise like any other (agreement.py), so this is about progress alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value
from shoal.protocol.quorum import is_quorum

APART_S = 2.0
"""So long a view has been without the votes that it needs before a member moves: who was lost may be back at once."""


def common_view(
    previous: Value, view: int, promised: Mapping[PeerId, int], living: Collection[PeerId], leaves: Collection[PeerId]
) -> int:
    """The lowest view from `view` on in which the round after `previous` can be decided; `view` if there is none.

    promised: below which view a member votes no more, 0 if it is not in there.
    """
    for candidate in sorted({view, *(later for later in promised.values() if later > view)}):
        voters = {peer for peer in living if promised.get(peer, 0) <= candidate}
        if is_quorum(previous, voters, leaves):
            return candidate
    return view
