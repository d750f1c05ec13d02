"""Bugs of rollouts: scores, trust, selection, groups, the learner."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

SAPO: tuple[Bug, ...] = (
    bug(
        "a liar stays trusted a lie longer",
        "tests/node/sapo/test_trust.py::test_liar_is_ignored_after_four_lies_and_nobody_else",
        "standing.ignored = standing.ignored or standing.demerits >= self._settings.ignored_at",
        "standing.ignored = standing.ignored or standing.demerits > self._settings.ignored_at",
    ),
    bug(
        "demerits do not decay",
        "tests/node/sapo/test_trust.py::test_demerits_decay_by_half_lives_and_the_second_chance_is_shorter",
        "standing.demerits *= 0.5 ** ((self._round - standing.round) / self._settings.half_life)",
        "standing.demerits *= 0.5 ** ((standing.round - standing.round) / self._settings.half_life)",
    ),
    bug(
        "a flood puts a peer out for ever",
        "tests/node/sapo/test_trust.py::test_flood_does_not_put_a_peer_out_for_ever",
        "standing.demerits = min(standing.demerits + weight, 4 * self._settings.ignored_at)",
        "standing.demerits = standing.demerits + weight",
    ),
    bug(
        "a peer that is let in again keeps all its demerits against it",
        "tests/node/sapo/test_trust.py::test_demerits_decay_by_half_lives_and_the_second_chance_is_shorter",
        "if standing.ignored and standing.demerits <= self._settings.ignored_at / 2:",
        "if standing.ignored and standing.demerits < self._settings.ignored_at:",
    ),
    bug(
        "advantages are not centred",
        "tests/node/sapo/test_grpo.py::test_advantages_are_standardised_within_the_group",
        "centred = values - values.mean()",
        "centred = values - values.min()",
    ),
    bug(
        "the standard deviation is that of a sample",
        "tests/node/sapo/test_grpo.py::test_advantages_are_standardised_within_the_group",
        "return (centred / (values.std(correction=0) + epsilon)).float()",
        "return (centred / (values.std() + epsilon)).float()",
    ),
    bug(
        "the wider clip is the lower",
        "tests/node/sapo/test_grpo.py::test_ratio_is_clipped_low_for_bad_and_high_for_good",
        "bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)",
        "bounded = ratio.clamp(1 - settings.clip_high, 1 + settings.clip_low)",
    ),
    bug(
        "what is behind a completion counts",
        "tests/node/sapo/test_grpo.py::test_loss_and_gradient_equal_a_reference",
        "return -torch.where(batch.mask, terms, 0.0).sum() / (batch.mask.sum() if tokens is None else tokens)",
        "return -terms.sum() / (batch.mask.sum() if tokens is None else tokens)",
    ),
)
