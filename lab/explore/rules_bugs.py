"""Bugs that can be planted in the model of the rules, one at a time, to show that an exploration finds them."""

from __future__ import annotations

import enum


class Bug(enum.Enum):
    """A rule that is broken, and how."""

    # What a member accepts.
    ACCEPTS_WITHOUT_MOVES = "accepts a proposal of a later view without a quorum's ViewChanges"
    IGNORES_CERTIFICATES = "accepts any value with a quorum's ViewChanges, whatever these show"
    FOLLOWS_LOWEST = "takes the lowest prepare certificate among the ViewChanges to compel"
    BELIEVES_INVENTED = "believes what a ViewChange says was prepared, without a certificate"
    ACCEPTS_UNFAIR = "accepts whatever members, leaves and tokens a free lead names"
    ACCEPTS_FALSE = "accepts a digest that it did not compute"
    COMPARES_COMPELLED = "refuses a compelled value that it would not accept from a free lead"
    # What it counts.
    SMALL_CERTIFICATE = "takes one Prepare fewer than a quorum for a prepare certificate"
    ONE_STEP = "votes at once, without a prepare certificate, and carries votes in its ViewChanges"
    MIXES_VIEWS = "counts Prepares of all views together"
    MIXES_VOTES = "counts votes of all views together"
    MIXES_VALUES = "counts Prepares of a view for whatever value"
    SIGNER_TWICE = "counts a signer twice"
    STRANGERS = "counts signers that are not of the electorate"
    UNPROVEN_LEAVES = "subtracts leaves that nobody signed"
    TIE_FOR_TWO = "gives the casting vote to two members"
    HALF = "takes half of the electorate for a quorum, whoever that is"
    TWO_THIRDS_DOWN = "rounds two thirds down"
    # What it signs.
    VOTES_TWICE = "votes twice in a view"
    PREPARES_TWICE = "prepares two values in a view"
    PREPARES_BELOW = "prepares in a view below the one that it promised"
    VOTES_BELOW = "votes in a view below the one that it promised"
    HIDES_CERTIFICATE = "moves without showing its prepare certificate"
    SHOWS_LOWEST = "moves with its lowest prepare certificate"
    SIGNS_AFTER_LEAVING = "signs after it left"
    LEAVES_AFTER_SIGNING = "leaves after it signed"
    # What it remembers.
    FORGETS_PREPARE = "does not write its Prepare"
    FORGETS_VOTE = "does not write its Vote"
    FORGETS_PROMISE = "does not write its promise"
    FORGETS_LEAVE = "does not write that it left"
    FORGETS_PROPOSAL = "does not write its proposal"
    SENDS_FIRST = "sends before it writes"
    # What a lead does, and where members go.
    LEAD_IGNORES_HIGHEST = "as a lead, proposes its own value although a certificate compels another"
    LEAD_TAKES_LOWEST = "as a lead, proposes the value of the lowest certificate"
    LEAD_BELIEVES_INVENTED = "as a lead, proposes what a ViewChange says was prepared, without a certificate"
    FOLLOWS_ONE = "follows one member to a view far ahead"
