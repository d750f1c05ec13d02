"""A stand-in for a node, for tests of the testnet itself: it logs what a node logs, in lockstep with its siblings.

    python fake_node.py DATA_DIR FOUNDERS ROUNDS HOLDS LAST GATE MODE

ROUNDS is "-" for no end, HOLDS is "ROUND:PHASE:PROGRESS,…" or "-". GATE is "INDEX:STARTS,…" or "-": the round LAST
does not begin before those nodes have started so often. A node that is dead or stopped is not waited for. MODE is
"well", "crash" (exit 7 at once), "silent" (listen, then log nothing), "fork" (certify other digests), "absent"
(certify nothing, and be told what others certified), "lost" (the same from its second start on), or "hung" (do not end
when asked to leave). A newcomer, or who comes back, begins after the round that its siblings have reached.
Control is by files: `op-release` ends a hold, `op-leave` the node.
"""

import json
import os
import sys
import time
from pathlib import Path

POLL_S = 0.004
DEADLINE_S = 60.0


def runs(pid):
    """Whether the process is there and not stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "TZ"
    except (FileNotFoundError, ProcessLookupError):
        return False


def whole_lines(text):
    """A reader may see the beginning of a line that is being appended, where it crosses into another page."""
    return text[: text.rfind("\n") + 1].splitlines()


class Node:
    def __init__(self, data_dir, founders, rounds, holds, last, gate, mode):
        self.folder = Path(data_dir)
        self.founders = int(founders)
        self.rounds = None if rounds == "-" else int(rounds)
        self.holds = [] if holds == "-" else [hold.split(":") for hold in holds.split(",")]
        self.last = int(last)
        self.gate = [] if gate == "-" else [starts.split(":") for starts in gate.split(",")]
        self.mode = "absent" if mode == "lost" and self.starts(self.folder.name) else mode
        self.rounds_done = 0
        self.ends_at = time.monotonic() + DEADLINE_S

    def log(self, event, **fields):
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), "event": event, **fields}) + "\n")

    def wait(self, condition):
        met = False
        while not met:
            met = condition()
            if self.mode != "hung" and (self.folder / "op-leave").exists():
                self.log("left", reason="asked")
                sys.exit(0)
            if time.monotonic() > self.ends_at:
                sys.exit(9)
            if not met:
                time.sleep(POLL_S)

    def siblings(self):
        """(pid, last round, gone) of every other node that listens."""
        for log in self.folder.parent.glob("*/events.jsonl"):
            if log.parent == self.folder:
                continue
            pid, last, gone, listens = 0, 0, False, False
            for line in whole_lines(log.read_text()):
                event = json.loads(line)
                if event["event"] == "started":
                    pid, gone, listens = event["pid"], False, False
                listens |= event["event"] == "listening"
                gone |= event["event"] == "left"
                if event["event"] in ("certified", "caught_up"):
                    last = event["round"]
            if listens:
                yield pid, last, gone or not runs(pid)

    def all_reached(self, round):
        siblings = list(self.siblings())
        if round == 0 and len(siblings) + 1 < self.founders:
            return False
        return all(gone or last >= round for _, last, gone in siblings)

    def gate_open(self):
        return all(self.starts(index) >= int(count) for index, count in self.gate)

    def starts(self, index):
        log = self.folder.parent / index / "events.jsonl"
        return log.read_text().count('"listening"') if log.exists() else 0

    def hold(self, round):
        for number, phase, progress in self.holds:
            if int(number) == round:
                self.log("holding", round=round, phase=phase, progress=float(progress))
                release = self.folder / "op-release"
                self.wait(release.exists)
                release.unlink()
                self.log("released", round=round, phase=phase)

    def run(self):
        if self.mode == "crash":
            self.log("failed", message="no such luck")
            sys.exit(7)
        if int(self.folder.name) >= self.founders or self.starts(self.folder.name):
            self.wait(lambda: any(not gone for _, _, gone in self.siblings()))
        first = max((last for _, last, gone in self.siblings() if not gone), default=0)
        self.log("started", peer_id="", pid=os.getpid(), boot=1, seconds=0.0)
        if first:
            self.log("caught_up", round=first, how="chain")
        self.log("listening", addresses=[f"/fake/{self.folder.name}"])
        self.wait(lambda: self.mode != "silent" and self.all_reached(first))
        for sibling in range(self.founders - 1):
            self.log("linked", peer=str(sibling))
        if not first:
            self.log("evaluated", round=0, loss=8.0, metric="bits per byte")
        round = first
        while self.rounds is None or round < self.rounds:
            round += 1
            if round == self.last:
                self.wait(self.gate_open)
            self.round(round)
        self.log("left", reason="rounds done")

    def round(self, round):
        self.log("round_started", term="0.0", round=round, members=4, role="contributor")
        self.hold(round)
        if self.mode == "absent":
            self.log("caught_up", round=round)
            self.wait(lambda: self.all_reached(round))
            return
        digest = f"{round:02x}" + ("ff" if self.mode == "fork" else "00") * 31
        self.rounds_done += 1
        traffic = {"lanes_sent": 1000 * self.rounds_done, "control_sent": 10 * self.rounds_done}
        self.log(
            "certified", term="0.0", round=round, digest=digest, value=digest, view=0, members=["a", "b"],
            contributors=2, coverage=1.0, tokens=64, reduce_s=0.01, total_s=0.02, **traffic,
        )  # fmt: skip
        self.log("evaluated", round=round, loss=8.0 - round / 8, metric="bits per byte")
        self.wait(lambda: self.all_reached(round))


if __name__ == "__main__":
    Node(*sys.argv[1:]).run()
