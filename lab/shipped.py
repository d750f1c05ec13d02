"""The manifest that `shoal init` writes, with the founders of a benchmark, and in what one differs from it."""

from __future__ import annotations

import msgspec

from shoal.cli.init import InitOptions, found
from shoal.cli.options import Strategy
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.strategies.table import DEFAULT_STRATEGY

Tables = dict[str, dict[str, object]]


def init_tables(
    name: str, founders: list[PeerId], workload: str = "regression", *, strategy: Strategy = DEFAULT_STRATEGY
) -> Tables:
    """The sections that `shoal init` writes, with these founders in place of the one that it has."""
    identity = Identity.generate()
    options = InitOptions(swarm_name=name, workload=workload, strategy=strategy)
    tables: Tables = msgspec.to_builtins(found(options, identity, identity))
    tables["swarm"] |= {"founders": founders, "authority": founders[0]}
    return tables


def not_default(manifest: Manifest) -> tuple[str, ...]:
    """Settings in which a manifest differs from what `shoal init` writes, but for who founded the swarm."""
    told: Tables = msgspec.to_builtins(manifest)
    tables = init_tables(manifest.swarm.name, manifest.swarm.founders)
    written = msgspec.to_builtins(validate_manifest(tables, source="the benchmark"))
    return tuple(
        f"{section}.{key} = {value}"
        for section, keys in sorted(told.items())
        if isinstance(keys, dict)
        for key, value in sorted(keys.items())
        if value != written[section][key]
    )
