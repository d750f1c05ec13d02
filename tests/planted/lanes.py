"""Bugs of the lanes: keys, nonces, replays, lengths, who may say what over them."""

from __future__ import annotations

from tests.planted.bugs import Bug, bug

LANES: tuple[Bug, ...] = (
    bug(
        "both directions of a lane have one key",
        "tests/swarm/lanes/test_seal.py::test_agreement_gives_each_direction_its_own_key",
        "return both[:KEY_BYTES], both[KEY_BYTES:]",
        "return both[:KEY_BYTES], both[:KEY_BYTES]",
    ),
    bug(
        "a nonce is used twice",
        "tests/swarm/lanes/test_seal.py::test_frames_reordered_are_refused",
        """
        self.frames += 1
        self.bytes_used += size
        """,
        """
        self.frames += self.bytes_used > 0
        self.bytes_used += size
        """,
    ),
    bug(
        "keys are used a frame beyond their limit",
        "tests/swarm/lanes/test_seal.py::test_keys_end_before_their_limit",
        "if self.bytes_used + size > LANE_LIMIT_BYTES:",
        "if self.bytes_used > LANE_LIMIT_BYTES:",
    ),
    bug(
        "the swarm is no part of what lanes are keyed by",
        "tests/swarm/lanes/test_seal.py::test_agreement_binds_the_whole_transcript",
        """
        parts = (
            swarm_id,
            answer.lane_id,
        """,
        """
        parts = (
            answer.lane_id,
        """,
    ),
    bug(
        "a lane is read on after a frame that did not open",
        "tests/swarm/lanes/test_seal.py::test_opener_opens_nothing_after_a_fault",
        "self._broken = True",
        "self._broken = False",
    ),
    bug(
        "a frame's header is no part of its seal",
        "tests/swarm/lanes/test_seal.py::test_frame_with_a_changed_header_is_refused",
        "self._cipher.encrypt_into(nonce, payload, head, out[HEADER_BYTES:size])",
        'self._cipher.encrypt_into(nonce, payload, b"", out[HEADER_BYTES:size])',
        "self._cipher.decrypt_into(nonce, sealed, head, out)",
        'self._cipher.decrypt_into(nonce, sealed, b"", out)',
    ),
    bug(
        "a frame may be a byte longer than its chunk",
        "tests/swarm/lanes/test_frame.py::test_header_decode_blames_the_peer",
        "if header.kind in BULK_KINDS and header.offset + header.length > header.total:",
        "if header.kind in BULK_KINDS and header.offset + header.length > header.total + 1:",
    ),
    bug(
        "a second hello is taken for a frame",
        "tests/swarm/lanes/test_lane.py::test_lane_refuses_a_second_hello",
        """
        if header.kind is FrameKind.HELLO:
            raise RemoteError("a second hello", peer=self.peer)
        """,
        """

        """,
    ),
    bug(
        "a place of a chunk is given out twice",
        "tests/swarm/lanes/test_chunks.py::test_place_of_a_frame_is_given_out_once",
        """
        self.given_out.add(header.offset)
        """,
        """
        self.given_out.add(header.length)
        """,
    ),
    bug(
        "the counter in a nonce is a byte",
        "tests/swarm/lanes/test_seal.py::test_no_two_frames_are_sealed_with_one_nonce",
        'nonce = self.frames.to_bytes(12, "big")',
        'nonce = (self.frames % 256).to_bytes(12, "big")',
    ),
    bug(
        "a cap that is set later is passed by in shared memory",
        "tests/swarm/lanes/test_requests.py"
        "::test_cap_that_is_set_later_ends_lanes_that_hand_over_in_memory_and_those_that_come_do_without",
        "if self._limits.capped and not was_capped:",
        "if False:",
    ),
    bug(
        "who takes nothing of what it asked for keeps a state's file for each time that it asked",
        "tests/node/state/test_states.py::test_who_asks_for_each_state_and_takes_nothing_keeps_none_of_them",
        "self._post(peer, header, piece if later is None else later)",
        "self._post(peer, header, piece)",
    ),
    bug(
        "a chunk that is held no more when its turn comes counts as waiting for ever",
        "tests/swarm/lanes/test_queue.py::test_frame_is_looked_up_when_its_turn_comes_and_each_part_for_itself",
        "self.queued_bytes -= header.length - frame[0].length",
        "self.queued_bytes -= 0",
    ),
    bug(
        "a chunk that cannot be read costs whoever asks for it its lane, with all that it carried",
        "tests/swarm/lanes/test_chunks.py"
        "::test_request_for_what_cannot_be_read_is_refused_whether_it_is_seen_at_once_or_when_its_turn_comes",
        "data = self._held(ref)\n",
        "data = self._lookup(ref)\n",
    ),
    bug(
        "who asks for many chunks together spends as little as for one",
        "tests/swarm/lanes/test_lane_rates.py"
        "::test_frames_that_carry_nothing_are_read_at_their_rate_over_all_lanes_of_a_peer",
        "self._queue.empty_frames.owe(1.0 + further, time.monotonic())",
        "self._queue.empty_frames.owe(1.0 + 0 * further, time.monotonic())",
    ),
    bug(
        "frames wait for a peer without end, a little in each of many scopes",
        "tests/swarm/lanes/test_queue.py::test_queue_bounds_the_frames_of_all_scopes_together",
        "if self._waiting_frames >= FULL_SCOPES * self._limit_frames:",
        "if self._waiting_frames >= SCOPE_LIMIT * self._limit_frames:",
    ),
    bug(
        "a lane for which there is no thread ends the node",
        "tests/swarm/lanes/test_pool.py::test_lane_for_which_the_system_has_no_thread_ends_and_nothing_else",
        "except RuntimeError as error:  # as many run as the system, or a container, allows",
        "except RecursionError as error:",
    ),
    bug(
        "lanes that were agreed on come all, however many there are by then",
        "tests/swarm/lanes/test_pool.py::test_lanes_that_were_agreed_on_and_come_at_once_are_no_more_than_may_be",
        """
        self._check_up()
        self._check_room(keys.peer)
        """,
        """
        self._check_up()
        """,
    ),
    bug(
        "a lane is asked for no longer than any short question",
        "tests/swarm/lanes/test_requests.py::test_a_lane_is_asked_for_as_long_as_anybody_waits_for_one",
        "peer, LANE_PROTOCOL, request, deadline_s=LANE_REQUEST_DEADLINE_S, limit_bytes=REQUEST_LIMIT_BYTES",
        "peer, LANE_PROTOCOL, request, deadline_s=REQUEST_DEADLINE_S, limit_bytes=REQUEST_LIMIT_BYTES",
    ),
    bug(
        "who leaves it to the other to dial does not see the lane that comes",
        "tests/swarm/lanes/test_pool.py"
        "::test_who_leaves_it_to_the_other_to_dial_has_the_lane_that_comes_or_says_that_none_did",
        "return self._satisfied(peer, self._limits.lanes_per_peer)",
        "return False",
    ),
    bug(
        "each of many lanes takes a huge page",
        "tests/swarm/lanes/test_pool.py::test_of_many_lanes_only_the_first_have_huge_pages",
        "huge=len(self._table.all()) < HUGE_LANES,",
        "huge=True,",
    ),
)
