"""`shoal bench compare` and the page that it writes, misses included.

Everything on the page is from the comparison it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.allreduce import MIB, Allreduce, FaultResult
from shoal.lab.bench.compare import Compare, Comparison, Sample, compare
from shoal.lab.case import Case, LongCaseOptions
from shoal.lab.page import cell, number, publish, spread, table, targets
from shoal.lab.targets import Spread
from shoal.protocol.errors import ConfigError

CAMPAIGN_LIMIT_BYTES: Final = 1 << 20

_DEFINITIONS: Final = """\
* **A reduce** begins when the first node has accepted the plan and ends when the last has every final chunk, decoded.
  Nodes decode while they make the next state; so that part is measured alone, for all nodes at once on all cores, and
  added. Contributions were encoded before; that finals are what their owners signed is checked afterwards. Of the
  yardstick it is the time between two barriers around the all-reduce. The times are medians over the measured
  iterations of a run; {warm_up} before them warm up.
* **The bare exchange** moves the same bytes in the same frames with the same cipher, hashes, codec and additions, by
  threads that do nothing else, and survives no fault: what an encrypted and checked reduce in Python costs on this
  machine at best. Its time too begins with encoded contributions and ends with encoded means.
* **The round beyond the reduce** is the rest until the last node has applied the certified state: the digest of the
  new state, report, proposal, vote, and what must be on disk.
* **Ratios** are taken within one repetition, in which all systems run one after the other; the table gives the median
  over the repetitions, and the least and the largest in brackets.
* **Wire bytes** are what a node sent over lanes and control in one round, the mean over nodes and rounds.
* **Peak memory** is the growth of the daemon's high-water mark in its first reduction, from the accepted plan until all
  finals are decoded, less 4 bytes for each value of the result; of the node for which it is largest. Later reductions
  find memory that was kept, or made ready, for them.
* **Error** is the largest of any value of the mean, against the mean in float64 of what the nodes had before encoding
  (values are uniform in ±0.5). *Exact* means that every node's result was recomputed and is the same to the bit.
* **A fault** strikes one node when half of the chunks are final there; no other node is held. The delay is how much
  longer that round took, to the last survivor's applied state, than the median of the undisturbed rounds of its run;
  where three share the cores of four it may be less than nothing. What is written to be recomputed is not in it.
* **Sockets** are those of loopback, through which everything goes between nodes that share no memory, as between
  machines (`--no-shared-memory`). Where it does not say so, nodes hand each other large frames, sealed as ever, in
  memory that both see, as nodes of one machine do.
* All nodes are processes of their own on one machine, over loopback: `shoal run` as a user starts it, with encryption,
  agreement and durability. Only the contributions are synthetic."""


def render(found: Comparison, campaign: Mapping[str, Any] | None = None) -> str:
    """The page. campaign: what a campaign of faults reported, as it stands in its JSON."""
    parts = [
        "# Benchmarks\n",
        f"Made by `{_command(found)}` on {found.machine.date}; no number here was written by hand.\n",
        "Measured on pages of their own: [training](training.md), [sharing rollouts](sapo.md), [faults](faults.md), "
        "[many peers](scale.md). [Where the time of a reduce goes]"
        "(decisions.md#where-the-time-of-a-reduce-goes), and why targets of "
        "speed are missed, stands with the decisions.\n",
        _machine(found),
        "## Targets\n",
        targets(found.rows),
        "## Times\n",
        f"All-reduce of {found.numel:,} values, in seconds: the median of {found.repeat} repetitions of {found.iters} "
        "iterations each, and the range of the repetitions' medians.\n",
        _times(found.samples),
        "## One run of each codec\n",
        _details(found.details),
        "## Faults\n",
        _faults(found.faults),
        "## How the numbers are defined\n",
        _DEFINITIONS.format(warm_up="two") + "\n",
    ]
    if campaign is not None:
        parts[-2:-2] = ["## Campaign\n", table(("what", "result"), sorted(_flattened(campaign)))]
    if found.notes:
        parts += ["## Left out, or wrong\n", "\n".join(f"* {cell(note)}" for note in found.notes) + "\n"]
    return "\n".join(parts)


def load_campaign(path: Path) -> dict[str, Any]:
    """Load a campaign's report. Raises ConfigError if the file is not a JSON object of a sane size."""
    try:
        with path.open("rb") as file:
            data = file.read(CAMPAIGN_LIMIT_BYTES + 1)
        if len(data) > CAMPAIGN_LIMIT_BYTES:
            raise ConfigError(f"--campaign: {path} is larger than {CAMPAIGN_LIMIT_BYTES} bytes; is it a report?")
        return msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"--campaign: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--campaign: {path} is not a JSON object: {error}") from None


def _command(found: Comparison) -> str:
    peers = ",".join(map(str, found.peers))
    rivals = [f" --rival '{name}=…'" for name in found.rivals]
    rivals += [f" --rival-regex '{name}={pattern}'" for name, pattern in found.rivals.items() if pattern]
    return (
        f"shoal bench compare --repeat {found.repeat} --peers {peers} --numel {found.numel} --iters {found.iters} "
        f"--fault-iters {found.fault_iters}" + "".join(rivals)
    )


def _machine(found: Comparison) -> str:
    m = found.machine
    facts = [
        ("processor", f"{m.cpu}, {m.cores} cores visible"),
        ("processor flags", ", ".join(m.flags) or "none of those that matter"),
        ("memory", f"{m.memory_gib} GiB"),
        ("kernel", m.kernel),
        ("software", f"Python {m.python}, torch {m.torch}"),
        ("load before the run", f"{m.load} processes wanted a core, over a minute"),
    ]
    return table(("machine", "what it is"), facts)


def _times(samples: Iterable[Sample]) -> str:
    keys = sorted({(s.peers, s.whole_s is not None, s.system) for s in samples})
    lines = []
    for peers, ours, system in keys:
        mine = [s for s in samples if (s.peers, s.system) == (peers, system)]
        whole = Spread.of_any(s.whole_s for s in mine if s.whole_s is not None)
        name = f"Shoal, {system}" if ours else system
        lines.append((str(peers), name, spread(Spread.of(s.median_s for s in mine)), spread(whole)))
    return table(("peers", "system", "reduce, s", "whole round, s"), lines)


def _details(details: Iterable[Allreduce]) -> str:
    lines = []
    for d in details:
        peak = "not measured" if d.peak_extra_bytes is None else f"{d.peak_extra_bytes / MIB:.0f}"
        error = "–" if d.max_abs_error is None else f"{d.max_abs_error:.1e}"
        exact = {True: "yes", False: "**no**", None: "not checked"}[d.exact]
        parts = " + ".join(f"{seconds:.2f}" for seconds in d.breakdown.values())
        wire = f"{d.wire_bytes_per_peer / 1e6:.1f}"
        lines.append((f"{d.codec}, {d.peers} peers", parts, wire, peak, error, exact))
    heads = (
        "codec",
        "reduce + work out + agree + apply, s",
        "wire bytes per peer, MB",
        "peak memory beyond input and output, MiB",
        "error",
        "exact",
    )
    return table(heads, lines)


def _faults(faults: Iterable[FaultResult]) -> str:
    lines = [
        (
            fault.kind.upper(),
            str(len(fault.delays_s)),
            spread(Spread.of_any(fault.delays_s)),
            "yes" if fault.survivors_identical else "**no**",
            "yes" if fault.exact else "**no**",
        )
        for fault in faults
    ]
    if not lines:
        return "Not measured.\n"
    return table(("signal to one of the nodes", "strikes", "added delay, s", "survivors identical", "exact"), lines)


def _flattened(found: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Every number, text and truth in nested objects under its path; of a list, only its length."""
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", f"{len(value)} entries"
        else:
            yield f"{prefix}{key}", number(value) if isinstance(value, float) else str(value)


# -- the command ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPage:
    """Comparison and its page; out: where that was written."""

    found: Comparison
    page: str
    out: Path | None


def run(wanted: Compare, tell: ShowNow) -> ComparedPage:
    """Run ours beside gloo and other systems, in turn, and write the page of benchmarks."""
    campaign = None if wanted.campaign is None else load_campaign(wanted.campaign)
    found = trio.run(compare, wanted, tell)
    page = render(found, campaign)
    if wanted.out is not None:
        publish(page, wanted.out)
    return ComparedPage(found=found, page=page, out=wanted.out)


CASE: Final = Case(
    spec=Compare,
    run=run,
    rows=attrgetter("found.rows"),
    lines=lambda compared: [f"written to {compared.out}" if compared.out else compared.page],
    document=attrgetter("found"),
    sound=attrgetter("found.ok"),
    options=LongCaseOptions,
)
