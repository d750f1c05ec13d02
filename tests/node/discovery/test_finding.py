"""Finding the swarm on real hosts on loopback: by what the user names, by the address book, and what a no does."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.node.discovery import finding as finding_module
from shoal.node.discovery.alone import NO_NETWORK
from shoal.node.discovery.finding import BOOK_NAME, Finding
from shoal.node.options import NodeConfig
from shoal.node.outcome import Notice, Progress
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import make_revocations
from shoal.protocol.peering import Full, Welcome
from shoal.protocol.records import seal_record
from shoal.swarm import dialling as dialling_module
from shoal.swarm import links as links_module
from shoal.swarm.host import Host
from shoal.swarm.members import Change, Members
from tests.swarm.quiet import Quiet
from tests.swarm.test_members import MANIFEST, Node, identity, manifest, stranger
from tests.waiting import running, until


@dataclass
class Finder(Node):
    """A node's members with its ways to the swarm; `folder` outlives it, its port does not."""

    folder: Path = Path()
    named: tuple[str, ...] = ()
    told: list[Progress] = field(default_factory=list)
    failure: BaseException | None = None
    finding: Finding = field(init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.host.run)
                await nursery.start(self.members.run)
                config = NodeConfig(manifest=self.manifest, data_dir=self.folder, join=self.named, mdns=False)
                self.finding = Finding(
                    folder=self.folder,
                    config=config,
                    host=self.host,
                    members=self.members,
                    on_progress=self.told.append,
                )
                nursery.start_soon(self._find)
                task_status.started()
                async for change in self.members.changes:
                    self.changes.append(change)
                    self.finding.heard(change)

    async def _find(self) -> None:
        try:
            await self.finding.run()
        except* ConfigError as group:
            self.failure = group.exceptions[0]

    def written(self) -> list[str]:
        """The peers in the book on disk, last linked first."""
        with contextlib.suppress(FileNotFoundError):
            return [entry["peer"] for entry in json.loads((self.folder / BOOK_NAME).read_bytes())["peers"]]
        return []


@pytest.fixture(autouse=True)
def _without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.1)
    monkeypatch.setattr(finding_module, "BOOK_SETTLE_S", 0.05)
    monkeypatch.setattr(finding_module, "BOOK_RETRY_S", 0.1)
    monkeypatch.setattr(finding_module, "BOOK_RETRY_LIMIT_S", 0.2)
    monkeypatch.setattr(finding_module, "JOIN_RETRY_S", 0.1)


def finder(tmp_path: Path, seed: int, *named: Node, boot: int = 1) -> Finder:
    folder = tmp_path / str(seed)
    folder.mkdir(exist_ok=True)
    return Finder(seed=seed, boot=boot, folder=folder, named=tuple(node.host.addresses[0] for node in named))


async def test_newcomer_with_one_live_address_links_with_all(tmp_path: Path) -> None:
    old = [Node(n) for n in (1, 2, 3)]
    async with running(*old) as nursery:
        for node in old[1:]:
            await node.join(old[0])
        gone = f"/ip4/127.0.0.1/tcp/9/p2p/{identity(99).peer_id}"
        newcomer = finder(tmp_path, 4, old[2])
        newcomer.named = (gone, *newcomer.named)
        await nursery.start(newcomer.run)
        await until(lambda: newcomer.linked() == {node.peer for node in old})
        await until(lambda: set(newcomer.written()) == {node.peer for node in old})


async def test_newcomer_dials_at_once_whom_its_first_member_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 1e6)
    other, newcomer = Node(2), Node(3)
    assert other.peer < newcomer.peer  # whom it would else wait for
    async with running(other, newcomer), stranger(1) as first:
        first.welcomes(others=(seal_record(other.sealer, other.record()),))
        await newcomer.members.links.join(first.host.addresses[0], deadline_s=5)
        await until(lambda: other.peer in newcomer.linked())


async def test_node_finds_its_swarm_again_by_the_one_known_peer_that_lives(tmp_path: Path) -> None:
    bootstrap, other, third = Node(1), Node(2), Node(3)
    async with running(bootstrap, other) as nursery:
        await other.join(bootstrap)
        before = finder(tmp_path, 4, bootstrap)
        await nursery.start(before.run)
        await until(lambda: set(before.written()) == {bootstrap.peer, other.peer})
        before.kill()
        bootstrap.kill()
        await nursery.start(third.run)  # joined while the node was away: not in its book
        await third.join(other)
        again = finder(tmp_path, 4, bootstrap, boot=2)
        await nursery.start(again.run)
        await until(lambda: again.linked() == {other.peer, third.peer})
        await until(lambda: again.written()[:1] != [bootstrap.peer] and third.peer in again.written())
        await until(lambda: [known.failures for known in again.finding.book.best()[:2]] == [0, 0])
        await until(lambda: again.finding.book.best()[-1].peer == bootstrap.peer)


async def test_node_that_starts_before_its_known_peer_finds_it_when_it_comes(tmp_path: Path) -> None:
    peer = Node(1)
    async with running(peer) as nursery:
        first = finder(tmp_path, 2, peer)
        await nursery.start(first.run)
        await until(lambda: first.written() == [peer.peer])
        first.kill()
        (port,) = {address.split("/")[4] for address in peer.host.addresses}
        peer.kill()
        again = finder(tmp_path, 2, boot=2)
        await nursery.start(again.run)
        await until(lambda: again.finding.book.best()[0].failures >= 2)
        assert again.linked() == frozenset()
        back = Node(1, boot=2)
        back.host = Host(identity=identity(1), listen=(f"/ip4/127.0.0.1/tcp/{port}",))
        back.members = members_of(back)
        await nursery.start(back.run)
        await until(lambda: again.linked() == {peer.peer})
        await until(lambda: again.finding.book.best()[0].failures == 0)


def members_of(node: Node) -> Members:
    return Members(
        host=node.host, sealer=node.sealer, swarm_id=MANIFEST.swarm_id, manifest=MANIFEST, record=node.record
    )


async def test_damaged_book_is_ignored_with_one_line_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer, damage = Node(1), b"{"
    async with running(peer) as nursery:
        node = finder(tmp_path, 2, peer)
        (node.folder / BOOK_NAME).write_bytes(damage)
        with caplog.at_level(logging.WARNING, logger="shoal.node"):
            await nursery.start(node.run)
            await until(lambda: node.linked() == {peer.peer})
        said = [record.getMessage() for record in caplog.records if "address book" in record.getMessage()]
        assert len(said) == 1
        assert said[0].startswith(f"the address book {node.folder / BOOK_NAME} is ignored: ")
        with contextlib.suppress(ValueError):
            await until(lambda: (node.folder / BOOK_NAME).read_bytes() != damage)
        await until(lambda: node.written() == [peer.peer])


async def test_node_whom_all_that_it_was_told_of_refuse_ends_with_their_reason(tmp_path: Path) -> None:
    closed = manifest(allowed=[2])
    members = [Node(n, manifest=closed) for n in (1, 2)]
    async with running(*members) as nursery:
        outsider = finder(tmp_path, 3, *members)
        outsider.manifest = closed
        outsider.__post_init__()
        await nursery.start(outsider.run)
        await until(lambda: outsider.failure)
        assert str(outsider.failure).startswith("no member lets this node in: refused: admission is allowlist and")
        assert len(outsider.told) == 2
        assert outsider.written() == []


async def test_node_whose_member_is_full_tells_its_user_once_and_comes_back_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "LINK_LIMIT", 1)
    monkeypatch.setattr(finding_module, "JOIN_RETRY_S", 0.05)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 1e6)
    full, guest, newcomer = Node(1), Quiet(2), finder(tmp_path, 3)
    async with running(full) as nursery:
        await nursery.start(guest.host.run)
        assert isinstance(await guest.ask_at(full.host.addresses[0], full.peer, guest.hello()), Welcome)
        await until(lambda: guest.peer in full.linked())
        came: list[float] = []
        answer = full.members.full

        def noting(peer: PeerId) -> Full:
            came.append(trio.current_time())
            return answer(peer)

        monkeypatch.setattr(full.members, "full", noting)
        newcomer.named = (full.host.addresses[0],)
        await nursery.start(newcomer.run)
        await until(lambda: len(came) >= 4)
        pauses = [later - sooner for sooner, later in itertools.pairwise(came)]
        assert pauses[2] >= 0.05 * 4, "doubled each time"
        (told,) = newcomer.told
        assert isinstance(told, Notice)
        assert f"{full.peer} is full" in told.text
        assert newcomer.failure is None
        full.members.links.drop(guest.peer)
        await until(lambda: newcomer.linked() == {full.peer})


async def test_node_that_finds_nobody_says_so_and_says_so_again_until_somebody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding_module, "ALONE_S", 0.2)
    monkeypatch.setattr(finding_module, "ALONE_PERIOD_S", 0.3)
    tell_alone = Finding._tell_alone

    async def told_after_a_try(finding: Finding) -> None:
        await until(lambda: finding._failed)
        await tell_alone(finding)

    monkeypatch.setattr(Finding, "_tell_alone", told_after_a_try)
    member = Node(1)
    async with running(member) as nursery:
        address = member.host.addresses[0]
        member.kill()
        newcomer = finder(tmp_path, 5)
        newcomer.named = (address,)
        await nursery.start(newcomer.run)
        await until(lambda: len(newcomer.told) >= 2)
        for told in newcomer.told:
            assert isinstance(told, Notice)
            assert told.text.startswith("linked with nobody for ")
            assert "Tried: nobody listens at 127.0.0.1:" in told.text
        assert newcomer.finding.alerts
        with monkeypatch.context() as offline:
            offline.setattr(Host, "is_cut_off", True)
            (alert,) = newcomer.finding.alerts
            assert alert.endswith(f" s: {NO_NETWORK}")
        other = Node(2)
        await nursery.start(other.run)
        await newcomer.join(other)
        await until(lambda: newcomer.linked() == {other.peer})
        assert newcomer.finding.alerts == []


async def test_founder_whose_members_all_took_their_leave_is_told_of_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding_module, "ALONE_S", 0.1)
    founder, member = finder(tmp_path, 1), Node(2)
    two = msgspec.structs.replace(MANIFEST.swarm, founders=[founder.peer, member.peer], authority=founder.peer)
    founder.manifest = member.manifest = msgspec.structs.replace(MANIFEST, swarm=two)
    founder.__post_init__()
    member.__post_init__()
    async with running(founder, member):
        await until(lambda: founder.finding.alerts)  # it looks for the other founder
        await member.join(founder)
        await until(lambda: founder.linked() == {member.peer})
        member.phase = "leaving"
        member.members.announce()
        await until(lambda: founder.members.left_in_order(Change("died", member.peer)))
        member.kill()
        await until(lambda: founder.says("died", member))
        told = len(founder.told)
        with trio.move_on_after(0.5):  # five times as long as it takes for who went without a word
            await until(lambda: founder.finding.alerts)
        assert (founder.finding.alerts, len(founder.told)) == ([], told)


async def test_only_founder_of_a_swarm_looks_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding_module, "ALONE_S", 0.1)

    founder = finder(tmp_path, 1)
    founder.manifest = msgspec.structs.replace(
        MANIFEST,
        swarm=msgspec.structs.replace(MANIFEST.swarm, founders=[founder.peer], authority=identity(98).peer_id),
    )
    founder.__post_init__()
    async with running(founder):
        with trio.move_on_after(0.5):  # five times as long as somebody else would wait
            await until(lambda: founder.told or founder.finding.alerts)
        assert founder.finding.alerts == []
        assert founder.told == []


async def test_refused_node_goes_on_where_another_address_is_still_tried(tmp_path: Path) -> None:
    closed = manifest(allowed=[2])
    member = Node(1, manifest=closed)
    async with running(member) as nursery:
        outsider = finder(tmp_path, 3, member)
        outsider.manifest = closed
        outsider.__post_init__()
        outsider.named += (f"/ip4/127.0.0.1/tcp/9/p2p/{identity(99).peer_id}",)
        await nursery.start(outsider.run)
        await until(lambda: outsider.told)
        with trio.move_on_after(0.3):  # three more tries of the other address
            await until(lambda: outsider.failure)
        assert outsider.failure is None


async def test_node_whom_all_of_its_book_refuse_ends_and_one_with_a_peer_that_is_away_goes_on(tmp_path: Path) -> None:
    member, other = Node(1), Node(2)
    async with running(member, other) as nursery:
        await other.join(member)
        first = finder(tmp_path, 3, member)
        await nursery.start(first.run)
        await until(lambda: set(first.written()) == {member.peer, other.peer})
        first.kill()
        member.members.revoke(make_revocations(identity(1), MANIFEST.swarm_id, None, [first.peer]))
        await until(lambda: other.members.admission.revocations)
        again = finder(tmp_path, 3, boot=2)
        await nursery.start(again.run)
        await until(lambda: again.failure)
        assert str(again.failure).startswith(f"the swarm's authority has revoked {again.peer}; ask who runs the swarm")
        again.kill()
        other.kill()
        alone = finder(tmp_path, 3, boot=3)
        await nursery.start(alone.run)
        await until(lambda: alone.told)
        with trio.move_on_after(0.3):  # three more goes at the book
            await until(lambda: alone.failure)
        assert alone.failure is None
