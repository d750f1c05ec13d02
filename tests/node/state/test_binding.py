"""A folder takes a corrected manifest before its first round, and no other swarm's once it has anything of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.node.remains import FILES
from shoal.node.state.binding import GOES, STAYS, bind, bound_to
from shoal.node.state.store import Store
from shoal.protocol.durable import DurableRecord
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import Manifest, load_manifest
from shoal.protocol.messages import Term


@pytest.fixture
def manifests(tmp_path: Path) -> tuple[Manifest, Manifest]:
    """As `init` wrote it for the folder `one`, and as its user corrected it."""
    path = tmp_path / "swarm.toml"
    assert execute(["init", "--data-dir", str(tmp_path / "one"), "--workload", "regression", "-o", str(path)]) == 0
    first = load_manifest(path)
    path.write_text(path.read_text().replace("[workload.options]", "[workload.options]\ninputs = 8"))
    return first, load_manifest(path)


def started(folder: Path, manifest: Manifest) -> None:
    """Start on the folder and come to nothing, as where the workload cannot be built."""
    with Store(folder) as store:
        bind(folder, manifest)
        store.next_boot()
    (folder / "rollouts" / "groups").mkdir(parents=True)


def test_corrected_manifest_takes_the_folder_of_a_start_that_made_no_round(
    tmp_path: Path, manifests: tuple[Manifest, Manifest]
) -> None:
    folder, (first, corrected) = tmp_path / "one", manifests
    started(folder, first)
    key = (folder / "node.key").read_bytes()
    (folder / "state" / "0.safetensors").write_bytes(b"S(0)")
    (folder / "layout.json").write_text("[]")
    assert first.swarm_id != corrected.swarm_id
    assert bound_to(folder) is None
    bind(folder, corrected)
    assert (folder / "swarm").read_text() == corrected.swarm_id.hex()
    assert load_manifest(folder / "swarm.toml") == corrected
    assert [name for name in GOES if (folder / name).exists()] == []
    assert (folder / "state").is_dir()
    assert (folder / "node.key").read_bytes() == key
    assert (folder / "boot").read_text() == "1\n"


def test_promise_binds_a_folder_to_its_swarm(tmp_path: Path, manifests: tuple[Manifest, Manifest]) -> None:
    """Or it would be forgotten, and given otherwise, when the node comes back to the first swarm."""
    folder, (first, corrected) = tmp_path / "one", manifests
    started(folder, first)
    with Store(folder) as store:
        store.persist(DurableRecord(kind="ready", term=Term(), round=1))
    promised = (folder / "agreement.log").read_bytes()
    with pytest.raises(ConfigError, match=r"belongs to another swarm .* `shoal init --data-dir NEW -o NEW.toml`"):
        bind(folder, corrected)
    assert (folder / "swarm").read_text() == first.swarm_id.hex()
    assert (folder / "agreement.log").read_bytes() == promised
    bind(folder, first)
    other = tmp_path / "other.toml"
    again = ["init", "--data-dir", str(folder), "--workload", "regression", "--swarm-name", "new", "-o", str(other)]
    assert execute([*again, "--force"]) == 2
    assert not other.exists()


@pytest.mark.parametrize("damaged", [b"", b"\xf0\x00", b"0e28ac0feb0d"])
def test_damaged_id_of_the_swarm_is_told_and_not_taken_for_that_of_another(
    tmp_path: Path, manifests: tuple[Manifest, Manifest], damaged: bytes
) -> None:
    folder, (first, _) = tmp_path / "one", manifests
    started(folder, first)
    (folder / "swarm").write_bytes(damaged)
    bind(folder, first)
    with Store(folder) as store:
        store.persist(DurableRecord(kind="ready", term=Term(), round=1))
    (folder / "swarm").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"/swarm is damaged; write the swarm's id into it"):
        bind(folder, first)
    (folder / "swarm").write_text(first.swarm_id.hex())
    bind(folder, first)


OF_ROUNDS = (*sorted({*FILES} - {*STAYS, *GOES, "state"}), "state/1.safetensors", "of a later release")


@pytest.mark.parametrize("name", OF_ROUNDS)
def test_whatever_may_be_of_a_round_binds(tmp_path: Path, manifests: tuple[Manifest, Manifest], name: str) -> None:
    folder, (first, _) = tmp_path / "one", manifests
    started(folder, first)
    path = folder / name.replace("*", "x")
    if path.is_dir():
        path = path / "of-a-round"
    path.write_bytes(b"something")
    assert bound_to(folder) == first.swarm_id.hex()
