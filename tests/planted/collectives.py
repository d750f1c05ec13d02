"""Bugs of the arithmetic and of the reduction: grid, codecs, sums, weights, repair, finals, outer steps."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

COLLECTIVES: tuple[Bug, ...] = (
    bug(
        "places of changes reach beyond the chunk",
        "tests/collectives/test_policy_image.py::test_bytes_that_no_encoder_writes_are_refused",
        "if places[-1] >= n or steps.max() >= 1 << 16:",
        "if steps.max() >= 1 << 16:",
    ),
    bug(
        "an image is rounded towards zero",
        "tests/collectives/test_policy_image.py::test_images_are_bf16_to_nearest_even",
        "rounded += np.uint32(0x7FFF)",
        "rounded &= np.uint32(0)",
    ),
    bug(
        "a state's digest leaves its image out",
        "tests/collectives/test_state.py::test_digest_of_an_imaged_state_covers_its_image",
        'return domain_hash("imaged state", canonical([*preimage, image]))',
        'return domain_hash("imaged state", canonical(preimage))',
    ),
    bug(
        "buffers travel in the codec of the parameters",
        "tests/collectives/test_buffers.py::test_reduction_averages_buffers_in_fp32_under_every_codec",
        """
        parameters, buffers = split_codec(name)
        return BUFFERS if chunk >= grid.chunks - buffers else codec(parameters)
        """,
        """
        parameters, _ = split_codec(name)
        return codec(parameters)
        """,
        """
        parameters, buffers = split_codec(name)
        return BUFFERS if chunk >= grid.chunks - buffers else final_codec(parameters)
        """,
        """
        parameters, _ = split_codec(name)
        return final_codec(parameters)
        """,
    ),
    bug(
        "buffers take the outer step",
        "tests/collectives/test_buffers.py::test_outer_step_replaces_buffers_and_keeps_those_that_nobody_gave",
        """
        if how.plain:
            return self._make_buffers(chunk, how, final)
        """,
        "",
    ),
    bug(
        "buffers that nobody gave become zero",
        "tests/collectives/test_buffers.py::test_outer_step_replaces_buffers_and_keeps_those_that_nobody_gave",
        "elif any(final.bitmap):",
        "elif final.sound:",
    ),
    bug(
        "buffers count in the norm of the mean gradient",
        "tests/collectives/test_buffers.py::test_outer_step_replaces_buffers_and_keeps_those_that_nobody_gave",
        """
        if how.plain:
            return 0.0
        known = self._squares.get(chunk)
        """,
        "known = self._squares.get(chunk)",
    ),
    bug(
        "buffers are clipped by the norm of an update",
        "tests/collectives/test_buffers.py::test_norms_clip_no_buffers",
        """
        if how.plain:
            if aggregate.rule == "mean":
                return _wide_mean(how, terms, out)
        """,
        """
        if False:
            if aggregate.rule == "mean":
                return _wide_mean(how, terms, out)
        """,
    ),
    bug(
        "contributions are added as they arrived",
        "tests/collectives/test_reduce.py::test_finals_equal_the_reference_in_any_delivery_order",
        """
            for place in self._contributors
            if place in inbox.arrived
        ]
        """,
        """
            for place in inbox.arrived
        ]
        """,
    ),
    bug(
        "the sum is divided by the weights of all who were planned",
        "tests/collectives/test_reduce.py::test_contribution_with_nan_is_left_out_of_that_chunk_only",
        """
        counted = [term for term in terms if term.place not in undecodable]
        fault = _sum(how, counted, out)
        """,
        """
        counted = [term for term in terms if term.place not in undecodable]
        fault = _sum(how, counted, out, sum(term.weight for term in terms))
        """,
        "def _sum(how: Codec, terms: Sequence[Term], out: F32) -> int | None:",
        "def _sum(how: Codec, terms: Sequence[Term], out: F32, weight: int = 0) -> int | None:",
        "divisor = np.float32(sum(term.weight for term in terms))",
        "divisor = np.float32(weight or sum(term.weight for term in terms))",
    ),
    bug(
        "a clip shrinks the divisor as well",
        "tests/collectives/test_aggregate_mean.py::test_clip_multiplies_the_sum_and_not_the_divisor",
        "divisor = np.float32(sum(term.weight for term in terms))",
        "divisor = np.float32(sum(float(term.factor) for term in terms))",
    ),
    bug(
        "a mean is made by a reciprocal",
        "tests/collectives/test_aggregate_mean.py::test_mean_is_the_plain_formula_to_the_bit",
        "np.divide(total, divisor, out=total)",
        "np.multiply(total, np.float32(1) / divisor, out=total)",
    ),
    bug(
        "a sum begins at the first contribution",
        "tests/collectives/test_aggregate_mean.py::test_sum_begins_at_positive_zero",
        "total_before: F32 | np.float32 = np.float32(0)",
        "total_before: F32 | np.float32 = np.float32(-0.0)",
    ),
    bug(
        "the two magnitudes of a 2-bit block change places",
        "tests/collectives/test_codecs.py::test_many_blocks_agree_with_plain_python",
        "np.concatenate([low, np.maximum(upper, low)], axis=1)",
        "np.concatenate([np.maximum(upper, low), low], axis=1)",
    ),
    bug(
        "what encoding lost is dropped",
        "tests/collectives/test_two_bit.py"
        "::test_what_was_sent_and_what_is_left_are_all_that_was_owed_and_what_is_left_stops_growing",
        "np.subtract(here, out, out=out)",
        "out.fill(0)",
    ),
    bug(
        "a 2-bit border stays at the mean, and residuals pile up",
        "tests/collectives/test_two_bit.py"
        "::test_what_was_sent_and_what_is_left_are_all_that_was_owed_and_what_is_left_stops_growing",
        "border: F32 = np.maximum(np.maximum(mean, between), magnitudes.min(axis=1, keepdims=True))",
        "border: F32 = np.maximum(np.minimum(mean, between), magnitudes.min(axis=1, keepdims=True))",
    ),
    bug(
        "a 2-bit chunk may say more values than it has",
        "tests/collectives/test_codecs.py::test_decode_refuses_what_no_encoder_writes",
        "if codes[:, out.shape[1] :].any():",
        "if codes[:, out.shape[1] + 1 :].any():",
    ),
    bug(
        "a contribution is summed whatever its root says",
        "tests/collectives/test_reduce.py::test_contribution_that_differs_from_its_root_is_left_out",
        "return encoded if proven else None",
        "return encoded if proven or path else None",
    ),
    bug(
        "a chunk is summed before all have come",
        "tests/collectives/test_reduce.py::test_finals_equal_the_reference_in_any_delivery_order",
        "if self._closed or inbox is None or inbox.owing:",
        "if self._closed or inbox is None or len(inbox.owing) > 1:",
    ),
    bug(
        "an owner that gets a chunk back signs it anew",
        "tests/collectives/test_repair_revisions.py::test_owner_that_gets_a_chunk_back_posts_the_same_bytes",
        "elif not (chunk in self._inboxes or chunk in self._summing or chunk in self._signed):",
        "elif not (chunk in self._inboxes or chunk in self._summing):",
    ),
    bug(
        "a final that is being read while its owner is closed off is taken",
        "tests/collectives/test_repair.py::test_final_that_is_being_read_while_its_owner_is_closed_off_is_not_taken",
        "return not (self._closed or refused or final.chunk in self._finals) and self.final_format.accepts(final)",
        "return not (self._closed or final.chunk in self._finals) and self.final_format.accepts(final)",
    ),
    bug(
        "finals are told at a close off that nobody checked",
        "tests/collectives/test_repair.py::test_final_that_its_owner_did_not_sign_is_not_told",
        "if final.chunk not in unsound:",
        "if final.chunk >= 0:",
    ),
    bug(
        "a final of another result than stands is accepted",
        "tests/collectives/test_repair.py::test_final_of_the_owner_that_differs_from_the_one_that_stands_is_refused",
        "return standing is None or standing[1] == final.result",
        "return standing is None or bool(standing[1])",
    ),
)
