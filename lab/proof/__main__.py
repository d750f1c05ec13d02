"""`python -m shoal.lab.proof`: prove what is claimed in figures and not proven of the code as it is (`make proof`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.lab.proof.claims import CLAIMS, Claim
from shoal.lab.proof.page import UNPROVEN, told
from shoal.lab.proof.prove import prove
from shoal.lab.proof.results import Result, is_older, read_results, write_result
from shoal.protocol.errors import ShoalError, did_you_mean


def main(arguments: Sequence[str] | None = None, *, claims: Sequence[Claim] = CLAIMS) -> int:
    """The command; returns 1 if a target is missed, 2 if it cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m shoal.lab.proof", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this claim; repeatable")
    parser.add_argument("--full", action="store_true", help="those too that take hours")
    parser.add_argument("--again", action="store_true", help="those too that are proven of the code as it is")
    parser.add_argument("--list", action="store_true", help="tell what is known, and carry out nothing")
    asked = parser.parse_args(arguments)
    try:
        chosen = _chosen(claims, asked.only, full=asked.full)
        return _list(chosen) if asked.list else _prove_all(chosen, claims, again=asked.again)
    except ShoalError as error:
        print(error, file=sys.stderr)
        return 2


def _chosen(claims: Sequence[Claim], only: Sequence[str], *, full: bool) -> list[Claim]:
    """The claims that are asked for. Raises ShoalError for a name that none has."""
    names = [claim.name for claim in claims]
    for name in only:
        if name not in names:
            raise ShoalError(f"there is no claim {name!r}{did_you_mean(name, names, '; --list has all')}")
    return [claim for claim in claims if (claim.name in only if only else full or not claim.full)]


def _list(chosen: Sequence[Claim]) -> int:
    root = Path.cwd()
    results = read_results(root)
    for claim in chosen:
        result = results.get(claim.name)
        state = UNPROVEN if result is None else "holds" if result.holds else "missed"
        old = result is not None and is_older(root, claim, result)
        print(f"{state:<14}  {'older' if old else '':<5}  {claim.name}: {claim.command}")
    return 0


def _prove_all(chosen: Sequence[Claim], claims: Sequence[Claim], *, again: bool) -> int:
    root = Path.cwd()
    failed = 0
    for number, claim in enumerate(chosen, 1):
        result = read_results(root).get(claim.name)
        if again or result is None or is_older(root, claim, result):
            print(f"{number} of {len(chosen)}, {claim.name}: {claim.command}", file=sys.stderr)
            result = prove(claim, root)
            write_result(root, result, claims)
        failed += not result.holds
        _tell(result)
    print(f"{len(chosen) - failed} of {len(chosen)} hold")
    return 1 if failed else 0


def _tell(result: Result) -> None:
    print("\n".join(told(result)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
