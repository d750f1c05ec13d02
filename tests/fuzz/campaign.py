"""Many mutated messages into every decoder and handler: `python -m tests.fuzz.campaign --count 1000000`.

Decoders get three quarters of them, handlers, of which each takes far longer, the rest. Where atheris is installed,
half of what decoders get is chosen by it for the branches that it reaches; it starts from the same samples and mutates
with the same mutators. Exits with 1 if anything was found; what was found is kept as files under --out.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import trio
from blake3 import blake3

from tests.fuzz.handlers import handler_targets
from tests.fuzz.judge import Finding, Tally, judge
from tests.fuzz.mutators import mutate
from tests.fuzz.targets import Target, decoder_targets

HANG_S = 120
"""So long without an end, an example hangs: the traceback is printed and the campaign ends."""
BATCH = 64
MIB = 1 << 20


async def feed(targets: Sequence[Target], count: int, seed: int, tallies: dict[str, Tally]) -> list[Finding]:
    """`count` examples in all, as many for each target."""
    rng = random.Random(seed)
    findings: dict[tuple[str, str, str], Finding] = {}
    share = -(-count // len(targets))
    for target in targets:
        tally = tallies.setdefault(target.name, Tally())
        for number in range(share):
            if number % BATCH == 0:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                await trio.lowlevel.checkpoint()
            data = mutate(rng.choice(target.samples), target.samples, rng)
            found = await judge(target, data, tally)
            if found is not None:
                findings.setdefault((found.target, found.where, found.what.split(":")[0]), found)
    faulthandler.cancel_dump_traceback_later()
    return list(findings.values())


async def run(decoders: int, handlers: int, seed: int, tallies: dict[str, Tally]) -> list[Finding]:
    findings = await feed(decoder_targets(), decoders, seed, tallies) if decoders else []
    async with handler_targets() as targets:
        findings += await feed(targets, handlers, seed + 1, tallies)
    return findings


def keep(findings: Iterable[Finding], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for found in findings:
        name = f"{found.target.replace(' ', '-')}-{blake3(found.data).hexdigest()[:12]}"
        (folder / name).write_bytes(found.data)
        print(f"found: {found.target}: {found.what} at {found.where}; kept as {folder / name}", flush=True)


def guided(runs: int, seed: int, folder: Path) -> int:
    """Let atheris choose; returns how many findings it ended with, 0 or 1, for it stops at the first."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        f"-runs={runs}",
        f"-seed={seed}",
        f"-artifact_prefix={folder}/",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, "-print_final_stats=1", "-max_len=65536"], capture_output=True, text=True, check=False
    )
    print("\n".join(done.stderr.splitlines()[-12:]), flush=True)
    return int(done.returncode != 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--no-atheris", action="store_true")
    asked = parser.parse_args(arguments)
    began, cpu = time.monotonic(), time.process_time()
    handlers = asked.count // 4
    with_atheris = not asked.no_atheris and importlib.util.find_spec("atheris") is not None
    by_atheris = (asked.count - handlers) // 2 if with_atheris else 0
    tallies: dict[str, Tally] = {}
    findings = trio.run(run, asked.count - handlers - by_atheris, handlers, asked.seed, tallies)
    keep(findings, asked.out)
    found = len(findings) + (guided(by_atheris, asked.seed, asked.out) if by_atheris else 0)
    fed = sum(tally.examples for tally in tallies.values())
    report = {
        "examples": fed + by_atheris,
        "by_atheris": by_atheris,
        "targets": len(tallies),
        "taken": sum(tally.taken for tally in tallies.values()),
        "refused": sum(sum(tally.refused.values()) for tally in tallies.values()),
        "findings": found,
        "worst_cpu_s": round(max(tally.worst_s for tally in tallies.values()), 4),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // MIB,
        "cpu_s": round(time.process_time() - cpu, 1),
        "seconds": round(time.monotonic() - began, 1),
        "seed": asked.seed,
    }
    print(json.dumps(report, indent=2))
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
