"""Event logs of a swarm that never was: as many peers, hours and rounds as wanted, with faults and clocks that differ.

python tests/testnet/day_of_logs.py OUT --peers 100 --hours 24 --round-s 60
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

BEGAN_AT = 1.8e9


def peer_id(number: int) -> str:
    """As long as a real one."""
    return f"12D3KooW{number:044d}"


def clock_ahead(number: int) -> float:
    """Seconds that this node's clock is ahead: within two minutes, another at each."""
    return round(random.Random(number).uniform(-120, 120), 3)


def events(number: int, *, peers: int, rounds: int, round_s: float) -> Iterator[dict[str, object]]:
    """One node's log, in true time. Every 7th node is killed once, at a third of the way, and is away for 3 rounds."""
    chance = random.Random(number)
    members = [peer_id(other) for other in range(peers)]
    boot, killed_in = 1, rounds // 3 if number % 7 == 3 else None

    def started(at: float) -> Iterator[dict[str, object]]:
        yield {"at": at, "event": "started", "peer_id": peer_id(number), "pid": 1000 + number, "boot": boot}
        yield {"at": at + 0.1, "event": "listening", "addresses": [f"/ip4/10.0.0.{number}/tcp/1"], "lanes": []}

    yield from started(BEGAN_AT)
    for round in range(1, rounds + 1):
        at = BEGAN_AT + round_s * round
        if killed_in is not None and killed_in <= round < killed_in + 3:
            continue
        if killed_in is not None and round == killed_in + 3:
            boot += 1
            yield from started(at - 1)
        common = {"term": "0.0", "round": round}
        yield {"at": at, "event": "round_started", **common, "members": peers, "role": "training"}
        yield {"at": at + 0.7 * round_s, "event": "contributed", "round": round, "tokens": 4096, "loss": 2.0}
        yield {"at": at + 0.75 * round_s, "event": "planned", "round": round, "view": 0, "participants": peers}
        if round == rounds // 3:
            for other in range(peers):
                if other % 7 == 3 and other != number:
                    yield {"at": at + 0.8 * round_s, "event": "died", "peer": peer_id(other)}
        yield {"at": at + 0.85 * round_s, "event": "reduced", "round": round, "seconds": 1.5, "digest": f"{round:064x}"}
        yield {"at": at + 0.9 * round_s, "event": "voted", **common, "view": 0}
        yield {
            "at": at + 0.95 * round_s + chance.uniform(0, 0.05),
            "event": "certified",
            **common,
            "digest": f"{round:064x}",
            "value": f"{round:064x}",
            "view": 0,
            "members": members,
            "contributors": peers,
            "coverage": 1.0,
            "tokens": 4096 * peers,
            "reduce_s": 1.5,
            "total_s": 0.95 * round_s,
            "lanes_sent": 1_000_000 * round,
            "control_sent": 10_000 * round,
        }
        yield {"at": at + 0.97 * round_s, "event": "evaluated", "round": round, "loss": 8 / round**0.5}


def write_logs(out: Path, *, peers: int, rounds: int, round_s: float) -> None:
    """Each node's folder with its log, by its own clock."""
    for number in range(peers):
        folder = out / "nodes" / str(number)
        folder.mkdir(parents=True)
        with (folder / "events.jsonl").open("w", encoding="utf-8") as file:
            for event in events(number, peers=peers, rounds=rounds, round_s=round_s):
                at = round(float(str(event["at"])) + clock_ahead(number), 6)
                file.write(json.dumps({**event, "at": at}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--round-s", type=float, default=60.0)
    asked = parser.parse_args()
    write_logs(asked.out, peers=asked.peers, rounds=int(asked.hours * 3600 / asked.round_s), round_s=asked.round_s)
