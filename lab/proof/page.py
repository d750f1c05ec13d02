"""The page of claims: what is claimed, with which command, and what it came to when, generated for the site."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from shoal.lab import page
from shoal.lab.proof.claims import CLAIMS, Claim
from shoal.lab.proof.results import PLACE, Result, is_older, read_results
from shoal.lab.targets import Row

UNPROVEN: Final = "not proven yet"
HEAD: Final = f"""# What is proven

Every claim in figures that a command proves, made of `{PLACE}`, which `make proof` writes: it carries out what is not
there or was measured with other code, and ends with an error where a target is missed. **Older** means that code which
the claim is about has changed since.
"""


def render(root: Path, claims: Iterable[Claim] = CLAIMS) -> str:
    """The page, from the results of the checkout `root`."""
    claims = list(claims)
    results = read_results(root)
    older = {one.name for one in claims if one.name in results and is_older(root, one, results[one.name])}
    missed, everything = _missed(claims, results), _all(claims, results, older)
    return "\n".join([HEAD, "## What is missed\n", *missed, "\n## All\n", *everything])


def _missed(claims: Iterable[Claim], results: Mapping[str, Result]) -> list[str]:
    """A table of the rows below their targets, with why."""
    lines = [
        (claim.name, text, claim.why or page.UNKNOWN)
        for claim in claims
        if (result := results.get(claim.name)) is not None
        for text in ([result.trouble] if result.trouble else []) + [str(row) for row in result.missed]
    ]
    return [page.table(("claim", "what", "why"), lines)] if lines else ["Nothing.\n"]


def _all(claims: Iterable[Claim], results: Mapping[str, Result], older: set[str]) -> list[str]:
    """Of each claim its command, its age, and its rows."""
    parts = []
    for claim in claims:
        result = results.get(claim.name)
        parts.append(f"### {claim.name[0].upper()}{claim.name[1:]}\n\n`{claim.command}`\n")
        if result is None:
            parts.append(f"{UNPROVEN[0].upper()}{UNPROVEN[1:]}{', since it takes long' * claim.full}.\n")
            continue
        machine = result.machine
        when = f"`{result.commit}`, {machine.date}, {machine.cores} cores ({machine.cpu}), load {machine.load:g} before"
        parts.append(f"{when}, {result.seconds:.0f} s{'; **older**' * (claim.name in older)}.\n")
        parts.append(page.targets(result.rows) if result.rows else f"**{result.trouble}**\n")
    return parts


def told(result: Result) -> list[str]:
    """A result for people: a line for the command, one for each row."""
    word = "holds" if result.holds else "MISSED"
    return [
        f"{result.claim}: {word}, {result.seconds:.0f} s: {result.command}",
        *([f"  {result.trouble}"] if result.trouble else []),
        *(f"  {_mark(row)} {row}" for row in result.rows),
    ]


def _mark(row: Row) -> str:
    return {True: "met   ", False: "MISSED", None: "      "}[row.met]
