"""What each check says of a machine that is well, and of one that is not; and a real trial of a small workload."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio

from shoal.cli.main import execute
from shoal.node import doctor, doctor_trial
from shoal.node.control import ControlServer
from shoal.node.control_client import JsonValue, MemberStatus, Status
from shoal.node.doctor import Examination, TrialReport, TrialRequest
from shoal.node.state.disk_need import bytes_on_disk
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.invites import make_invite, make_revocations
from shoal.protocol.manifest import Manifest, OptimizerName, load_manifest
from shoal.protocol.swarm_link import LinkInvite
from shoal.protocol.wire import canonical
from tests.cli.test_status import STATUS
from tests.small_disk import small_disk

GB = 1_000_000_000


def founded(tmp_path: Path, *arguments: str) -> Manifest:
    out = tmp_path / "swarm.toml"
    assert execute(["init", "--data-dir", str(tmp_path / "founder"), "-o", str(out), *arguments]) == 0
    return load_manifest(out)


def test_versions_name_what_a_supporter_asks_for() -> None:
    check = doctor.versions()
    assert check.ok
    assert all(word in check.detail for word in ("Python 3.", "shoal 0.", "torch 2.", "libp2p 0.", "Linux"))


def test_first_lines_wait_for_no_import_of_the_network() -> None:
    heavy = "{'libp2p', 'torch'} & sys.modules.keys()"
    told = f"import sys; from shoal.node import doctor; doctor.versions(); assert not {heavy}"
    subprocess.run([sys.executable, "-c", told], check=True)


def test_clock_that_runs_backwards_or_coarsely_is_found() -> None:
    assert doctor.clock().ok
    backwards = itertools.chain([5.0, 4.0], itertools.count(6.0))
    assert not doctor.clock(monotonic=lambda: next(backwards)).ok
    coarse = itertools.count(0.0, 0.02)
    assert not doctor.clock(monotonic=lambda: next(coarse)).ok
    check = doctor.clock(wall=lambda: 1_000_000.0)
    assert (check.ok, "timedatectl" in check.remedy) == (False, True)


def test_few_file_descriptors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 512))
    check = doctor.open_files()
    assert not check.ok
    ways = ("`LimitNOFILE=65536` in a service's unit", "`* hard nofile 65536` in /etc/security/limits.conf for logins")
    assert [way for way in ways if way in check.remedy] == list(ways)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 4096))  # a node raises it
    assert doctor.open_files().ok


def test_bbr_that_is_not_offered_gets_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic\n")
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic\n")
    check = doctor.congestion_control(tmp_path)
    assert (check.ok, "modprobe tcp_bbr" in check.remedy) == (True, True)
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno cubic bbr\n")
    assert doctor.congestion_control(tmp_path).remedy == ""
    assert doctor.congestion_control(tmp_path / "none").ok


def test_a_taken_port_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lanes = Examination(data_dir=tmp_path, lane_listen=("127.0.0.1", port))
        control = Examination(data_dir=tmp_path, listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        for wanted in (lanes, control):
            check = doctor.ports(wanted, running=False)
            assert (check.ok, "--listen" in check.remedy) == (False, True)
        assert doctor.ports(lanes, running=True).ok
    assert doctor.ports(lanes, running=False).ok


def test_key_that_others_can_read_is_found(tmp_path: Path) -> None:
    assert "first `shoal run` makes it" in doctor.key(tmp_path).detail
    peer = Identity.load_or_create(tmp_path / "node.key").peer_id
    assert doctor.key(tmp_path).detail.startswith(peer)
    (tmp_path / "node.key").chmod(0o644)
    assert "chmod 600" in doctor.key(tmp_path).remedy
    (tmp_path / "node.key").write_bytes(b"nonsense")
    (tmp_path / "node.key").chmod(0o600)
    assert not doctor.key(tmp_path).ok


def test_disk_speed_leaves_nothing_behind(tmp_path: Path) -> None:
    check = doctor.disk_speed(tmp_path / "not" / "yet", size=4 << 20)
    assert check.ok
    assert str(tmp_path) in check.detail
    assert list(tmp_path.iterdir()) == []


def test_disk_speed_of_a_disk_smaller_than_the_test_is_measured(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 24 << 20) as disk:
        check = doctor.disk_speed(disk / "node")
        assert (check.ok, list(disk.iterdir())) == (True, [])


def test_a_disk_that_cannot_be_written_is_found() -> None:
    check = doctor.disk_speed(Path("/proc"), size=1)  # not even root may
    assert (check.ok, "--data-dir" in check.remedy) == (False, True)


def test_a_disk_that_is_read_only_is_found(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        check = doctor.disk_speed(disk)
    assert (check.ok, check.detail) == (False, f"{disk} cannot be written: Read-only file system")


def test_a_broken_lane_is_found() -> None:
    def broken() -> float:
        raise NetworkError("the lane ended")

    assert doctor.lane(lambda: 2e9).detail == "2000 MB/s to itself, encrypted"
    assert not doctor.lane(broken).ok


def test_data_folder_of_another_user_or_of_all_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    assert "first `shoal run` makes it" in doctor.data_folder(folder).detail
    folder.mkdir()
    for mode, said in ((0o755, "open to others, until the next start closes it"), (0o700, "for its user alone")):
        folder.chmod(mode)
        assert doctor.data_folder(folder) == doctor.Check(name="data folder", ok=True, detail=f"{folder}, {said}")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    folder.chmod(0o1777)
    assert doctor.data_folder(folder).remedy == f"choose a folder of its own, such as {folder / 'shoal'}"
    folder.chmod(0o700)
    found = doctor.data_folder(folder)
    assert (found.ok, found.detail) == (False, f"{folder} belongs to another user, who can take this node's keys")
    assert "sudo chown -R" in found.remedy


def test_memory_and_disk_are_measured_against_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Examination(data_dir=tmp_path, manifest=founded(tmp_path))
    large = TrialReport(numel=100 * GB)
    for check in (doctor.memory(large, "adamw"), doctor.disk_space(wanted, large.numel)):
        assert not check.ok
        assert check.remedy
    small = TrialReport(numel=1000)
    assert doctor.memory(small, "adamw").ok
    assert doctor.disk_space(wanted, small.numel).ok
    for unknown in (doctor.memory(TrialReport(), "adamw"), doctor.disk_space(wanted, None)):
        assert (unknown.ok, unknown.detail.endswith("the need is known once the model of a swarm was tried here")) == (
            True,
            True,
        )
    needs: dict[OptimizerName, str] = {"adamw": "4.2", "adamw8bit": "3.6"}  # 32 and 26.1 bytes a parameter, and 1 GB
    for optimizer, needed in needs.items():
        detail = doctor.memory(TrialReport(numel=GB // 10), optimizer).detail
        assert f"about {needed} GB needed for 100.0 million parameters and {optimizer}" in detail
    plain, small_moments = (bytes_on_disk(1_000_000, "int8", 1, optimizer) for optimizer in needs)
    assert (plain["work under way"], small_moments["work under way"]) == (36_000_000, 18_300_000)
    (tmp_path / "streaming").mkdir()
    manifest = founded(tmp_path / "streaming", "--strategy", "streaming")
    streaming = doctor.disk_space(Examination(data_dir=tmp_path, manifest=manifest), 1_000_000)
    assert "60 MB work under way, 15 MB contributions" in streaming.detail
    (tmp_path / "seats").mkdir()
    manifest = founded(tmp_path / "seats", "--strategy", "diloco", "--seats", "2")
    few_seats = doctor.disk_space(Examination(data_dir=tmp_path, manifest=manifest), 1_000_000)
    assert "48 MB work under way, 19 MB contributions" in few_seats.detail


def test_disk_has_room_for_checkpoints_and_logs_less_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = founded(tmp_path)  # int8
    folder = tmp_path / "data"
    (folder / "state").mkdir(parents=True)
    with (folder / "state" / "0.safetensors").open("wb") as file:
        file.truncate(9_000_000)  # of which a hole takes no room
        os.posix_fallocate(file.fileno(), 0, 8_192_000)
    (folder / "again").hardlink_to(folder / "state" / "0.safetensors")  # as a checkpoint's
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=250_000_000))
    detail = (
        "250 MB free, up to 250 MB more needed (28 MB states, 32 MB finals, 36 MB work under way, "
        "11 MB contributions, 16 MB checkpoints, 135 MB logs; 8 MB are there already)"
    )
    wanted = Examination(data_dir=folder, manifest=manifest)  # the model has 4 MB
    check = doctor.disk_space(wanted, 1_000_000)
    assert (check.ok, check.detail) == (False, detail)
    fewer = doctor.disk_space(Examination(data_dir=folder, manifest=manifest, checkpoints=0), 1_000_000)
    assert (fewer.ok, " 0 MB checkpoints" in fewer.detail) == (True, True)


def test_a_gpu_that_torch_cannot_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_nvidia", lambda: "NVIDIA H200, 570.86")
    check = doctor.device(TrialReport(torch="2.13.0+cpu", device="cpu"))
    assert (check.ok, "install torch with CUDA" in check.remedy) == (False, True)
    used = TrialReport(
        torch="2.13.0", device="cuda", device_name="NVIDIA H200", device_memory_bytes=139 * GB, cuda="13"
    )
    assert doctor.device(used).detail == "cuda NVIDIA H200, 139 GB; NVIDIA H200, 570.86; torch 2.13.0"
    assert not doctor.device(TrialReport(error="No module named torch")).ok
    busy = doctor.device(TrialReport(error="it took more than 14 s"))
    assert busy.ok
    assert "--trial" in busy.remedy


def test_who_may_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = founded(tmp_path, "--admission", "invite")
    assert doctor.membership(manifest, tmp_path / "founder").ok
    stranger = tmp_path / "stranger"
    assert "make one with `shoal id`" in doctor.membership(manifest, stranger).remedy
    Identity.load_or_create(stranger / "node.key")
    assert "shoal invite" in doctor.membership(manifest, stranger).remedy
    (tmp_path / "founder" / "swarm").write_text("a0" * 32)
    assert doctor.membership(manifest, tmp_path / "founder").ok
    (tmp_path / "founder" / "agreement.log").write_bytes(b"a promise")
    assert "another --data-dir" in doctor.membership(manifest, tmp_path / "founder").remedy


def test_link_counts_as_it_would_at_a_start_with_it(tmp_path: Path) -> None:
    manifest, guest = founded(tmp_path, "--admission", "invite"), tmp_path / "guest"
    authority, bearer = Identity.load(tmp_path / "founder" / "authority.key"), Identity.generate()

    def borne(expires: int = 2**33, by: Identity = authority) -> LinkInvite:
        invite = make_invite(by, manifest.swarm_id, holder=bearer.peer_id, bearer=True, expires=expires)
        return LinkInvite(invite=invite, key=bearer)

    def bound(holder: PeerId) -> LinkInvite:
        return LinkInvite(invite=make_invite(authority, manifest.swarm_id, holder=holder, expires=2**33))

    let_in = "invite: this node may join, unless its invite was revoked, which only a member can say"
    assert doctor.membership(manifest, guest, borne()).detail == let_in
    unnamed = doctor.membership(manifest, guest, bound(bearer.peer_id))
    assert (unnamed.ok, unnamed.detail) == (
        False,
        f"this link is for the node {bearer.peer_id}, and {guest} has no key",
    )
    assert not guest.exists(), "a look makes nothing"

    peer = Identity.load_or_create(guest / "node.key").peer_id
    for good in (borne(), bound(peer)):
        assert doctor.membership(manifest, guest, good).detail == let_in
    others = doctor.membership(manifest, guest, bound(bearer.peer_id))
    said = f"this link is for the node {bearer.peer_id}, and this one is {peer}"
    assert (others.ok, others.detail, others.remedy) == (False, said, "ask for another")
    assert "was not signed for this swarm" in doctor.membership(manifest, guest, borne(by=bearer)).detail
    expired = doctor.membership(manifest, guest, borne(expires=0))
    said = "your invite expired on 1970-01-01 00:00 UTC"
    assert (expired.ok, expired.detail, expired.remedy) == (False, said, "ask for another")
    (guest / "revocations").write_bytes(
        canonical(make_revocations(authority, manifest.swarm_id, None, [bearer.peer_id]))
    )
    revoked = doctor.membership(manifest, guest, borne())
    assert revoked.detail == "the swarm's authority has revoked the invite that you came with"
    assert revoked.remedy == "ask who runs the swarm for a new link"
    (guest / "revocations").unlink()
    (guest / "swarm").write_text(manifest.swarm_id.hex())
    (guest / "agreement.log").write_bytes(b"a promise")
    assert doctor.membership(manifest, guest, borne(expires=0)).ok, "a member may come back later"


@pytest.mark.parametrize("comes", [True, False])
def test_manifest_is_fetched_when_what_takes_a_moment_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    manifest, told = founded(tmp_path), list[str]()
    monkeypatch.setattr(doctor, "run_trial", lambda wanted, deadline_s: TrialReport(error="no torch"))
    monkeypatch.setattr(doctor, "disk_speed", lambda folder: doctor.arithmetic())

    def fetch() -> Manifest:
        assert told[0] == "versions"
        assert told[-1] == "data folder"
        if comes:
            return manifest
        raise NetworkError("no member gives the manifest; ask for a fresh link")

    for check in doctor.examine(Examination(data_dir=tmp_path / "guest", fetch=fetch)):
        told.append(check.name)
        if check.name == "manifest":
            assert (check.ok, check.remedy) == (comes, "" if comes else "ask for a fresh link")
    of_the_swarm = {"admission", "workload", "speed"}
    assert of_the_swarm.intersection(told) == (of_the_swarm if comes else set())
    assert {"manifest", "arithmetic", "device", "disk space", "memory"} <= set(told)


def test_an_allowlist_is_looked_at(tmp_path: Path) -> None:
    manifest = founded(tmp_path, "--admission", "allowlist")
    assert doctor.membership(manifest, tmp_path / "founder").ok
    peer = Identity.load_or_create(tmp_path / "stranger" / "node.key").peer_id
    check = doctor.membership(manifest, tmp_path / "stranger")
    assert (check.ok, f"admit {peer}" in check.remedy) == (False, True)


def test_a_workload_that_is_not_installed_is_found(tmp_path: Path) -> None:
    assert doctor.workload(founded(tmp_path), (), tmp_path).ok
    other = load_manifest(tmp_path / "swarm.toml")
    text = (tmp_path / "swarm.toml").read_text().replace('"text"', '"protein"')
    (tmp_path / "swarm.toml").write_text(text)
    other = load_manifest(tmp_path / "swarm.toml")
    check = doctor.workload(other, (), tmp_path)
    assert (check.ok, "install the Python package" in check.remedy) == (False, True)
    assert doctor.trial_request(Examination(data_dir=tmp_path, manifest=other), installed=False).workload is None


MINE = """
import pathlib
pathlib.Path("imported").touch()

class Mine:
    metric = "error"
    build = batches = loss = evaluate = None
"""


@pytest.mark.parametrize("allowed", ["", "mine", "mine:Other", "mine:Mine"])
@pytest.mark.parametrize("folder", ["founder", "stranger"])
def test_code_that_a_file_names_is_tried_only_where_this_command_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, allowed: str
) -> None:
    """Also by its founder, whose node runs it without a word."""
    monkeypatch.chdir(tmp_path)
    manifest = founded(tmp_path, "--workload", "mine:Mine")
    (tmp_path / "mine.py").write_text(MINE)  # now: `shoal init` tries what is there
    asked: list[TrialRequest] = []
    monkeypatch.setattr(doctor, "run_trial", lambda wanted, deadline_s: asked.append(wanted) or TrialReport())
    monkeypatch.setattr(doctor, "disk_speed", lambda folder: doctor.arithmetic())
    wanted = Examination(data_dir=tmp_path / folder, manifest=manifest, allowed=(allowed,) if allowed else ())
    checks = {check.name: check for check in doctor.examine(wanted)}
    is_allowed = allowed == "mine:Mine"
    assert checks["workload"].ok == (is_allowed or folder == "founder")
    assert ("--allow-workload mine:Mine" in checks["workload"].remedy) != is_allowed
    assert ("speed" in checks) == is_allowed
    assert [one.workload for one in asked] == ["mine:Mine" if is_allowed else None]
    assert not (tmp_path / "imported").exists()


def test_speed_says_why_it_is_not_known(tmp_path: Path) -> None:
    manifest = founded(tmp_path)
    assert doctor.speed(manifest, TrialReport(tokens_per_s=1234.0, steps=7, device="cpu")).detail.startswith("1,234 ")
    for arguments, said in (
        (("--strategy", "rollouts"), "char-policy trains in the agent, which doctor does not start"),
        (("--workload", "own-loop"), "own-loop trains in a process of its user's own"),
    ):
        assert doctor.speed(founded(tmp_path, "--force", *arguments), TrialReport()).detail == f"not tried: {said}"
    few = doctor.speed(manifest, TrialReport(tokens_per_s=1234.0, steps=1, device="cpu"))
    assert few.detail == "roughly 1,234 tokens/s over 1 step on cpu"
    late = doctor.speed(manifest, TrialReport(error="it took more than 1 s"))
    assert (late.ok, "--trial 60" in late.remedy) == (True, True)
    raised = doctor.speed(manifest, TrialReport(error="the workload raised ValueError: x"))
    assert (raised.ok, raised.remedy) == (False, "correct the workload or its options in the manifest")
    short = doctor.speed(manifest, TrialReport(error="x.txt holds too little text; give a longer file"))
    assert (short.detail, short.remedy) == ("x.txt holds too little text", "give a longer file")


def test_trial_of_a_real_workload_measures_its_speed() -> None:
    report = doctor.run_trial(TrialRequest(device="cpu", workload="regression", seconds=0.05), deadline_s=120.0)
    assert report.error is None
    assert report.device == "cpu"
    assert (report.numel or 0) > 0
    assert (report.tokens_per_s or 0) > 0


def test_size_of_a_policy_is_known_without_a_node(tmp_path: Path) -> None:
    asked = doctor.trial_request(
        Examination(data_dir=tmp_path, manifest=founded(tmp_path, "--strategy", "rollouts"), device="cpu"),
        installed=True,
    )
    report = doctor.run_trial(asked, deadline_s=120.0)
    assert (report.error, report.tokens_per_s) == (None, None)
    assert (report.numel or 0) > 1000
    needed = doctor.memory(report, "adamw").detail
    assert f"GB needed for {(report.numel or 0) / 1e6:.1f} million parameters and adamw" in needed


def test_model_of_a_node_that_trained_here_is_known_without_a_trial(tmp_path: Path) -> None:
    assert doctor.numel_here(tmp_path) is None
    layout = Layout(names=("w",), shapes=((3, 5),), numel=15)
    (tmp_path / "layout.json").write_bytes(msgspec.json.encode(layout))
    assert doctor.numel_here(tmp_path) == 15
    (tmp_path / "layout.json").write_text("{")
    assert doctor.numel_here(tmp_path) is None


def test_trial_of_a_workload_that_cannot_be_made_has_still_found_the_device() -> None:
    wanted = TrialRequest(device="cpu", workload="regression", options={"n_layer": 2})
    report = doctor.run_trial(wanted, deadline_s=120.0)
    assert "n_layer" in (report.error or "")
    assert (report.device, doctor.device(report).ok) == ("cpu", True)


def test_trial_has_a_speed_from_its_first_step_on() -> None:
    request = TrialRequest(device="cpu", workload="regression", seconds=0.05)
    reports = list(doctor_trial._findings(request, TrialReport(torch="x")))
    assert [report.tokens_per_s is not None for report in reports] == [False, False, True, True, True]
    assert [report.steps for report in reports[2:4]] == [1, 1]


@pytest.mark.parametrize(("others_s", "busy"), [(30.0, True), (1.0, False)])
def test_trial_that_was_cut_off_on_a_busy_machine_tells_its_figure_and_what_that_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_s: float, busy: bool
) -> None:
    readings = iter([(100.0, 50.0), (140.0, 50.0 + others_s)])
    monkeypatch.setattr(doctor, "_processor_s", lambda: next(readings))
    said = msgspec.json.encode(TrialReport(torch="x", device="cpu", tokens_per_s=1234.0, steps=1)) + b"\n"

    def too_long(*arguments: object, timeout: float, **settings: object) -> None:
        raise subprocess.TimeoutExpired("trial", timeout, output=said)

    monkeypatch.setattr("subprocess.run", too_long)
    report = doctor.run_trial(TrialRequest(device="cpu", workload="text"), deadline_s=14.0)
    check = doctor.speed(founded(tmp_path), report)
    why = ", while this machine was busy: other programs took 75% of its processors" if busy else ""
    assert check.detail == f"roughly 1,234 tokens/s over 1 step on cpu{why}"
    assert (check.ok, "--trial 60" in check.remedy) == (True, True)


def test_trial_itself_is_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "processor_s", lambda: (1.0, 1.0))
    _, before_s = doctor._processor_s()
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert before_s - doctor._processor_s()[1] >= 0.4  # counted in ticks


def test_trial_that_takes_too_long_is_ended() -> None:
    report = doctor.run_trial(TrialRequest(device="cpu", workload="text"), deadline_s=0.05)
    assert report.error == "it took more than 0.05 s"


def test_a_running_node_is_asked(tmp_path: Path) -> None:
    async def status() -> Mapping[str, JsonValue]:
        document: dict[str, JsonValue] = msgspec.to_builtins(STATUS)
        return document

    async def ask() -> tuple[doctor.Check, Status | None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer(tmp_path, {"status": status}).run)
            check = await trio.to_thread.run_sync(doctor.running_node, tmp_path)
            nursery.cancel_scope.cancel()
        return check

    assert doctor.running_node(tmp_path)[0].detail == f"none runs on {tmp_path}"
    check, known = trio.run(ask)
    assert check.detail == f"running on {tmp_path}, listening at {STATUS.addresses[0]}"
    assert known is not None
    assert "no member has tried yet" in doctor.dial_back(known).detail
    assert "no node runs here" in doctor.dial_back(None).detail
    start = "start the node with --join or a link, and ask again when members are linked"
    assert doctor.dial_back(None).remedy == start
    for reach, remedy in (("direct", "ask again when members have tried"), ("gone", start)):
        row = MemberStatus(peer_id=known.peer_id, phase="train", tokens_per_s=None, reach=reach)
        assert doctor.dial_back(msgspec.structs.replace(known, members=[row])).remedy == remedy
    relayed = msgspec.structs.replace(known, reachability="relayed")
    assert "forward the ports" in doctor.dial_back(relayed).remedy
    public = msgspec.structs.replace(known, reachability="public", proven=["/ip4/192.0.2.1/tcp/4001"])
    assert doctor.dial_back(public).detail == "reached by members at /ip4/192.0.2.1/tcp/4001"


def test_doctor_prints_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    founded(tmp_path)
    monkeypatch.setattr(doctor, "run_trial", lambda wanted, deadline_s: TrialReport(error="no torch"))
    monkeypatch.setattr("shoal.cli.doctor._lane_bytes_per_s", lambda: 1e9)
    capsys.readouterr()
    where = ["--data-dir", str(tmp_path / "founder")]
    assert execute(["doctor", str(tmp_path / "swarm.toml"), *where, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert all(set(check) == {"name", "ok", "detail", "remedy"} for check in document["checks"])
    assert [check["name"] for check in document["checks"] if not check["ok"]] == ["device", "speed"]
    assert execute(["doctor", *where]) == 1
    assert "FAIL  device: no torch\n      → see that torch imports" in capsys.readouterr().out
