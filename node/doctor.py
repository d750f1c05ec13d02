"""Checks of a machine, such as a supporter would ask for first: is it fit to train, and if not, what helps.

Every check answers in one line and ends on its own within seconds. `ok` is False only for what keeps a node from
taking part or from doing it right; what merely slows it down is fine, with a remedy all the same. What takes a moment
comes first, and what it does without is imported later.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import psutil  # type: ignore[import-untyped]

from shoal.collectives.codecs import check_denormals
from shoal.node.control_client import NodeNotRunning, Status, request
from shoal.node.control_groups import available_memory
from shoal.node.discovery.credentials import admission_of
from shoal.node.doctor_trial import TrialReport, TrialRequest
from shoal.node.founded import founded_here
from shoal.node.keys import NODE_KEY_NAME
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.node.machine_readings import processor_s
from shoal.node.options import CHECKPOINTS_KEPT
from shoal.node.state.binding import bound_to, check_free_for
from shoal.node.training.memory_need import trainer_bytes
from shoal.node.training.trainer_messages import InnerSettings
from shoal.node.workload import installed_workloads
from shoal.protocol.errors import ConfigError, LocalError, ShoalError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, OptimizerName
from shoal.protocol.manifest_workload import check_workload_allowed
from shoal.protocol.private_folder import is_shared, why_not_private
from shoal.protocol.swarm_link import LinkInvite

DISK_TEST_BYTES: Final = 64 << 20
DISK_PIECE_BYTES: Final = 4 << 20
DISK_TEST_SHARE: Final = 4
"""The test takes no more than one part in so many of what is free, but for its first piece."""
DISK_SLOW_BYTES_PER_S: Final = 20e6
TRIAL_DEADLINE_S: Final = 14.0
LATE: Final = "it took more than"
TRIAL_REPORT_LIMIT_BYTES: Final = 1 << 16
BUSY_SHARE: Final = 0.25
"""Of the processors, taken by others, from which on a speed says more of them than of the machine."""
TOOL_DEADLINE_S: Final = 5.0
FILES_WANTED: Final = 1024
FILES_ASKED: Final = 65_536
CLOCK_READS: Final = 20_000
CLOCK_STEP_LIMIT_S: Final = 0.01
YEAR_2024_S: Final = 1_704_067_200
DAEMON_BYTES_PER_VALUE: Final = 12
"""Anonymous and shared memory at the peak of a round (`shoal bench memory`); what lies in files is the kernel's."""
MEMORY_BASE_BYTES: Final = 1_000_000_000

NEED_UNKNOWN: Final = "; the need is known once the model of a swarm was tried here"
FEW_STEPS: Final = 5
LONGER: Final = "give it longer, such as --trial 60"

_PACKAGES: Final = ("shoal", "torch", "libp2p", "trio", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One answer. remedy: what to do, empty where nothing is to be done."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Subject of the checks. allowed: code to import. checkpoints: those that stay.

    fetch: gets the manifest by a link, and may take its time. invite: that of the link. lane: measures one to this
    machine, in bytes/s, unless None.
    """

    data_dir: Path
    manifest: Manifest | None = None
    fetch: Callable[[], Manifest] | None = None
    invite: LinkInvite | None = None
    listen: Sequence[str] = ()
    lane_listen: tuple[str, int] | None = None
    device: str = "auto"
    data: str | None = None
    allowed: Sequence[str] = ()
    trial_deadline_s: float = TRIAL_DEADLINE_S
    checkpoints: int = CHECKPOINTS_KEPT
    lane: Callable[[], float] | None = None


def examine(wanted: Examination) -> Iterator[Check]:
    """Make all checks, one after the other; each is told as soon as it is done. Blocks; raises nothing foreseen."""
    yield versions()
    yield clock()
    yield arithmetic()
    yield open_files()
    yield congestion_control()
    node, known = running_node(wanted.data_dir)
    yield node
    yield ports(wanted, running=known is not None)
    yield dial_back(known)
    yield key(wanted.data_dir)
    yield data_folder(wanted.data_dir)
    if wanted.fetch is not None:
        told, manifest = fetched(wanted.fetch)
        yield told
        wanted = replace(wanted, manifest=manifest)
    yield disk_speed(wanted.data_dir)
    if wanted.lane is not None:
        yield lane(wanted.lane)
    yield from _of_the_swarm(wanted)


def _of_the_swarm(wanted: Examination) -> Iterator[Check]:
    manifest, installed = wanted.manifest, True
    if manifest is not None:
        yield membership(manifest, wanted.data_dir, wanted.invite)
        found = workload(manifest, wanted.allowed, wanted.data_dir)
        installed = found.ok and _may_be_imported(manifest, wanted.allowed)
        yield found
    report = run_trial(trial_request(wanted, installed=installed), deadline_s=wanted.trial_deadline_s)
    yield device(report)
    report = msgspec.structs.replace(report, numel=report.numel or numel_here(wanted.data_dir))
    yield disk_space(wanted, report.numel)
    yield memory(report, manifest.inner.optimizer if manifest is not None else InnerSettings().optimizer)
    if manifest is not None and installed:
        yield speed(manifest, report)


def versions() -> Check:
    """List the versions that a report of trouble should name."""
    known = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    detail = f"Python {platform.python_version()}, {known}, {platform.system()} {platform.release()}"
    missing = [name for name in _PACKAGES if _version(name) == "missing"]
    remedy = f"install {', '.join(missing)}: `pip install shoal` in this environment" if missing else ""
    return Check(name="versions", ok=not missing, detail=detail, remedy=remedy)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def clock(monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> Check:
    """Check the clocks: deadlines run on the monotonic one; the wall clock only dates invites and log lines."""
    reads = [monotonic() for _ in range(CLOCK_READS)]
    steps = [after - before for before, after in itertools.pairwise(reads)]
    finest = min((step for step in steps if step > 0), default=float("inf"))
    if min(steps) < 0 or finest > CLOCK_STEP_LIMIT_S:
        return Check(
            name="clock",
            ok=False,
            detail="the monotonic clock runs backwards or too coarsely",
            remedy="choose another clock source of the system: /sys/devices/system/clocksource",
        )
    if wall() < YEAR_2024_S:
        return Check(
            name="clock",
            ok=False,
            detail="the wall clock is years behind, so invites cannot be dated",
            remedy="set the clock, for example with `timedatectl set-ntp true`",
        )
    return Check(name="clock", ok=True, detail=f"monotonic, in steps of {finest * 1e9:.0f} ns")


def arithmetic() -> Check:
    """Check that subnormal numbers are not flushed to zero: all members must compute the same bits."""
    try:
        check_denormals()
    except LocalError as error:
        return Check(
            name="arithmetic",
            ok=False,
            detail=str(error),
            remedy="find the library that sets FTZ/DAZ when it is loaded (built with -ffast-math) and replace it",
        )
    return Check(name="arithmetic", ok=True, detail="subnormal numbers are kept")


def open_files() -> Check:
    """Check the limit on open files: each peer takes some. A node raises the soft limit itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    how = f"`LimitNOFILE={FILES_ASKED}` in a service's unit, `* hard nofile {FILES_ASKED}` in /etc/security/limits.conf"
    remedy = "" if ok else f"raise the hard limit: {how} for logins"
    return Check(name="open files", ok=ok, detail=f"at most {soft} (hard limit {hard})", remedy=remedy)


def congestion_control(folder: Path = Path("/proc/sys/net/ipv4")) -> Check:
    """Check for BBR, which moves more over long lossy links; without it the kernel's choice is used."""
    try:
        offered = (folder / "tcp_available_congestion_control").read_text().split()
        allowed = (folder / "tcp_allowed_congestion_control").read_text().split()
    except OSError:
        return Check(name="congestion control", ok=True, detail="this system does not tell what it offers")
    if "bbr" in allowed or ("bbr" in offered and os.geteuid() == 0):
        return Check(name="congestion control", ok=True, detail="bbr is offered")
    return Check(
        name="congestion control",
        ok=True,
        detail=f"no bbr for this user (there is {', '.join(allowed) or 'nothing'}); long lossy links will be slower",
        remedy="`sudo modprobe tcp_bbr`, and add bbr to net.ipv4.tcp_allowed_congestion_control",
    )


def running_node(data_dir: Path) -> tuple[Check, Status | None]:
    """Check for a node that runs on the data folder, and return its status."""
    try:
        known = msgspec.convert(request(data_dir, "status", deadline_s=TOOL_DEADLINE_S), Status)
    except NodeNotRunning:
        return Check(name="node", ok=True, detail=f"none runs on {data_dir}"), None
    except (ShoalError, msgspec.ValidationError) as error:
        return Check(name="node", ok=False, detail=str(error), remedy="look at its log, and start it again"), None
    shown = ", ".join(known.addresses) or "no address"
    return Check(name="node", ok=True, detail=f"running on {data_dir}, listening at {shown}"), known


def ports(wanted: Examination, *, running: bool) -> Check:
    """Check that the ports the node would listen on are free, or, while it runs, its own."""
    places = [_place_of(address) for address in wanted.listen]
    if wanted.lane_listen is not None:
        places.append(wanted.lane_listen)
    if running:
        return Check(name="ports", ok=True, detail="the running node listens")
    for host, port in places or [("0.0.0.0", 0)]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        except OSError as error:
            return Check(
                name="ports",
                ok=False,
                detail=f"cannot listen on {host}:{port}: {error.strerror or error}",
                remedy="choose another port with --listen or --lane-listen, or end what listens there",
            )
    shown = ", ".join(f"{host}:{port}" for host, port in places) or "any port"
    return Check(name="ports", ok=True, detail=f"can listen on {shown}")


def _place_of(address: str) -> tuple[str, int]:
    """Host and port of a listen address such as /ip4/0.0.0.0/tcp/4001."""
    parts = address.split("/")
    return parts[2], int(parts[4])


def dial_back(known: Status | None) -> Check:
    """Check that others reach this machine: a running node has asked its members to dial it; no other way is sure."""
    if known is None or known.reachability == "unknown":
        why = "no node runs here" if known is None else "no member has tried yet"
        linked = known is not None and any(row.reach in ("direct", "through others") for row in known.members)
        tried = "have tried" if linked else "are linked"
        return Check(
            name="dial-back",
            ok=True,
            detail=f"not possible: {why}, and only a member can try whether this machine is reached from outside",
            remedy=f"{'' if linked else 'start the node with --join or a link, and '}ask again when members {tried}",
        )
    if known.reachability == "public":
        return Check(
            name="dial-back", ok=True, detail=f"reached by members at {', '.join(known.proven) or 'its ports'}"
        )
    return Check(
        name="dial-back",
        ok=True,
        detail=f"{known.reachability}: not reached from outside, so others reach it through members that are",
        remedy="forward the ports of --listen and --lane-listen on the router, for more speed",
    )


def key(data_dir: Path) -> Check:
    """Check the node's key: there, readable, and nobody else's."""
    path = data_dir / "node.key"
    if not path.exists():
        return Check(name="key", ok=True, detail=f"no {path} yet; the first `shoal run` makes it")
    try:
        peer = Identity.load(path).peer_id
    except (ShoalError, OSError) as error:
        detail, _, remedy = str(error).partition("; ")
        return Check(name="key", ok=False, detail=detail, remedy=remedy or "put back a copy of it")
    return Check(name="key", ok=True, detail=f"{peer}, readable by its user alone")


def data_folder(folder: Path) -> Check:
    """Check that this user alone can enter the data folder. A node closes it, where it may."""
    if not folder.exists():
        return Check(name="data folder", ok=True, detail=f"no {folder} yet; the first `shoal run` makes it")
    if is_shared(folder):
        remedy = f"choose a folder of its own, such as {folder / 'shoal'}"
        return Check(name="data folder", ok=False, detail=f"{folder} is shared by all users", remedy=remedy)
    trouble = why_not_private(folder)
    if trouble is not None and folder.stat().st_uid != os.geteuid():
        detail, _, remedy = trouble.partition("; ")
        return Check(name="data folder", ok=False, detail=detail, remedy=remedy)
    so_far = "for its user alone" if trouble is None else "open to others, until the next start closes it"
    return Check(name="data folder", ok=True, detail=f"{folder}, {so_far}")


def fetched(fetch: Callable[[], Manifest]) -> tuple[Check, Manifest | None]:
    """Check that the manifest is to be had by the link, and return it."""
    try:
        manifest = fetch()
    except (ShoalError, OSError) as error:
        detail, _, remedy = str(error).partition("; ")
        return Check(name="manifest", ok=False, detail=detail, remedy=remedy or "ask for a fresh link"), None
    detail = f"of the swarm {manifest.swarm.name} ({manifest.swarm_id.hex()[:16]}…)"
    return Check(name="manifest", ok=True, detail=detail), manifest


def disk_speed(data_dir: Path, size: int = DISK_TEST_BYTES) -> Check:
    """Measure how fast the data folder's disk takes bytes that stay."""
    from shoal.node.state.disk_need import existing_parent

    folder = existing_parent(data_dir)
    path = folder / f".shoal-doctor-{os.getpid()}"
    piece = os.urandom(DISK_PIECE_BYTES)
    try:
        began = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            pieces = max(1, min(size, shutil.disk_usage(folder).free // DISK_TEST_SHARE) // DISK_PIECE_BYTES)
            for _ in range(pieces):
                file.write(piece)
            os.fsync(file.fileno())
        rate = pieces * DISK_PIECE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        return Check(
            name="disk speed",
            ok=False,
            detail=f"{folder} cannot be written: {error.strerror or error}",
            remedy="make room or make it writable for this user, or choose another --data-dir",
        )
    finally:
        with contextlib.suppress(OSError):  # of a disk that is read-only: nothing was made there
            path.unlink(missing_ok=True)
    slow = rate < DISK_SLOW_BYTES_PER_S
    remedy = "checkpoints will take long; choose a --data-dir on a faster disk" if slow else ""
    return Check(name="disk speed", ok=True, detail=f"{rate / 1e6:.0f} MB/s, synced, in {folder}", remedy=remedy)


def lane(measure: Callable[[], float]) -> Check:
    """Measure how fast encrypted bulk data goes from this machine to itself: more than any network gives."""
    try:
        rate = measure()
    except (ShoalError, OSError) as error:
        return Check(name="lane", ok=False, detail=str(error), remedy="let local connections through the firewall")
    return Check(name="lane", ok=True, detail=f"{rate / 1e6:.0f} MB/s to itself, encrypted")


def membership(manifest: Manifest, data_dir: Path, invite: LinkInvite | None = None) -> Check:
    """Check that the swarm lets this node in, as far as can be known before asking it. invite: that of its link."""
    try:
        check_free_for(data_dir, manifest.swarm_id, founders=manifest.swarm.founders)
        peer = _peer_of(data_dir, manifest, invite)
        admission = admission_of(data_dir, manifest, peer, brought=invite)
        if (reason := admission.reason_not_to_know(peer)) is not None:
            raise ConfigError(f"{reason}; ask who runs the swarm to admit {peer}")
        is_new = bound_to(data_dir) is None  # who had a part in rounds may come back later
        if is_new and (reason := admission.reason_too_late(peer, admission.credential)) is not None:
            raise ConfigError(reason)
    except (ShoalError, OSError) as error:
        detail, _, remedy = str(error).partition("; ")
        return Check(name="admission", ok=False, detail=detail, remedy=remedy or "ask who runs the swarm")
    unless = "" if admission.credential is None else ", unless its invite was revoked, which only a member can say"
    return Check(name="admission", ok=True, detail=f"{manifest.swarm.admission}: this node may join{unless}")


def _peer_of(data_dir: Path, manifest: Manifest, invite: LinkInvite | None) -> PeerId:
    """Return this node's PeerId, or one such as its first start makes, where any may join. Raises ConfigError."""
    if (path := data_dir / NODE_KEY_NAME).exists():
        return Identity.load(path).peer_id
    if invite is not None and invite.key is None:
        raise ConfigError(
            f"this link is for the node {invite.invite.holder}, and {data_dir} has no key; "
            "give the --data-dir of that node, or ask for another link"
        )
    if manifest.swarm.admission == "allowlist" or (manifest.swarm.admission == "invite" and invite is None):
        raise ConfigError("this node has no key yet; make one with `shoal id`, and have its PeerId admitted")
    return Identity.generate().peer_id


def workload(manifest: Manifest, allowed: Sequence[str], data_dir: Path) -> Check:
    """Check that the manifest's workload is installed here, or may be imported. Imports nothing."""
    from shoal.node.sapo.policies import installed_policies

    name = manifest.workload.name
    known = (*installed_workloads(), *installed_policies(), OWN_LOOP)
    try:
        check_workload_allowed(
            manifest.workload, entry_points=known, allowed=allowed, founded=partial(founded_here, manifest, data_dir)
        )
    except ConfigError as error:
        detail, _, remedy = str(error).partition("; ")
        return Check(name="workload", ok=False, detail=detail, remedy=remedy or "install it")
    if not _may_be_imported(manifest, allowed):
        remedy = f"pass --allow-workload {name} to have it imported and tried"
        return Check(name="workload", ok=True, detail=f"{name}, with which this swarm was founded", remedy=remedy)
    return Check(name="workload", ok=True, detail=f"{name} {'may be imported' if ':' in name else 'is installed'}")


def _may_be_imported(manifest: Manifest, allowed: Sequence[str]) -> bool:
    """True if the user allows the workload in this very command, or installed it."""
    return ":" not in manifest.workload.name or manifest.workload.name in allowed


def trial_request(wanted: Examination, *, installed: bool) -> TrialRequest:
    """Return what can be tried: the manifest's workload, of a policy its size; else the device."""
    manifest = wanted.manifest
    if manifest is None or not installed or manifest.workload.name == OWN_LOOP:
        return TrialRequest(device=wanted.device)
    return TrialRequest(
        device=wanted.device,
        workload=manifest.workload.name,
        is_policy=manifest.rollouts is not None,
        options=dict(manifest.workload.options),
        data=wanted.data,
        seed=manifest.workload.seed,
        inner=InnerSettings.of(manifest),
    )


def _is_tried(manifest: Manifest) -> bool:
    return manifest.rollouts is None and manifest.workload.name != OWN_LOOP


def run_trial(wanted: TrialRequest, *, deadline_s: float) -> TrialReport:
    """Try in a process of its own for at most `deadline_s`; what it had said by then counts."""
    command, before = [sys.executable, "-P", "-m", "shoal.node.doctor_trial"], _processor_s()
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(wanted), capture_output=True, timeout=deadline_s, check=False
        )
        said, last = done.stdout, done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:400]
    except subprocess.TimeoutExpired as late:
        said, last = late.stdout or b"", f"{LATE} {deadline_s:g} s"
    reports = [line for line in said[:TRIAL_REPORT_LIMIT_BYTES].split(b"\n") if line.startswith(b'{"torch"')]
    if not reports:
        return TrialReport(error=last or "the trainer's process said nothing")
    report = msgspec.json.decode(reports[-1], type=TrialReport)
    passed_s, others_s = (now - then for now, then in zip(_processor_s(), before, strict=True))
    share = min(max(others_s / passed_s, 0.0), 1.0) if passed_s > 0 else 0.0
    report = msgspec.structs.replace(report, others_share=share)
    trains = wanted.workload is not None and not (wanted.is_policy or wanted.is_made_only)
    cut = report.tokens_per_s is None or last.startswith(LATE)
    unfinished = trains and cut and report.error is None
    return msgspec.structs.replace(report, error=last or "it ended early") if unfinished else report


def _processor_s() -> tuple[float, float]:
    """Processor seconds of this machine so far, and those used by others than this command and whom it waited for."""
    all_s, busy_s = processor_s()
    return all_s, busy_s - sum(psutil.Process().cpu_times()[:4])


def device(report: TrialReport) -> Check:
    """Check the device that training runs on, and for a GPU that lies idle because torch cannot use it."""
    driver = _nvidia()
    if not report.device and _late(report):
        return Check(
            name="device",
            ok=True,
            detail=f"not seen: {report.error}; the machine is busy, or its disk slow",
            remedy=LONGER,
        )
    if not report.device:
        detail = report.error or "the trainer's process did not start"
        return Check(
            name="device", ok=False, detail=detail, remedy="see that torch imports: `python -c 'import torch'`"
        )
    if driver and report.cuda is None and not report.device.startswith("cuda"):
        return Check(
            name="device",
            ok=False,
            detail=f"there is {driver}, and torch {report.torch} is built without CUDA",
            remedy="install torch with CUDA, see pytorch.org, or give --device cpu on purpose",
        )
    memory = f", {report.device_memory_bytes / 1e9:.0f} GB" if report.device_memory_bytes else ""
    shown = f"{report.device} {report.device_name}".strip() + memory
    return Check(name="device", ok=True, detail=f"{shown}; {driver or 'no NVIDIA driver'}; torch {report.torch}")


def _busy(report: TrialReport) -> str:
    """Tell what a measurement is worth that was made beside others."""
    if report.others_share < BUSY_SHARE:
        return ""
    return f", while this machine was busy: other programs took {report.others_share:.0%} of its processors"


def _late(report: TrialReport) -> bool:
    """True if nothing was wrong but that time ran out."""
    return report.error is not None and report.error.startswith(LATE)


def _nvidia() -> str:
    """GPUs and driver as NVIDIA's tool names them; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=TOOL_DEADLINE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(done.stdout.decode(errors="replace").strip().splitlines()[:8])


def numel_here(data_dir: Path) -> int | None:
    """Values of the model that a node on this data folder trained; None where there is none. Raises nothing."""
    from shoal.node.state.checkpoints import LAYOUT, read_layout

    with contextlib.suppress(ShoalError, OSError):
        return read_layout(data_dir / LAYOUT).numel
    return None


def disk_space(wanted: Examination, numel: int | None) -> Check:
    """Check that there is room on disk for all that a node keeps, less what of it is there already."""
    from shoal.node.state.disk_need import disk_need, existing_parent, megabytes

    manifest = wanted.manifest
    if numel is None or manifest is None or not manifest.strategy.certifies:
        unknown = manifest is not None and manifest.strategy.certifies
        free = shutil.disk_usage(existing_parent(wanted.data_dir)).free
        return Check(name="disk space", ok=True, detail=f"{megabytes(free)} free{NEED_UNKNOWN if unknown else ''}")
    need = disk_need(wanted.data_dir, manifest, numel, wanted.checkpoints)
    return Check(name="disk space", ok=need.fits, detail=need.text, remedy="" if need.fits else need.remedy)


def bytes_in_memory(numel: int, optimizer: OptimizerName = "adamw") -> dict[str, int]:
    """Bytes of memory that a node takes, by whom, of a model of `numel` values; `programs`: without any model."""
    return {
        "trainer": round(numel * trainer_bytes(optimizer)),
        "daemon": numel * DAEMON_BYTES_PER_VALUE,
        "programs": MEMORY_BASE_BYTES,
    }


def memory(report: TrialReport, optimizer: OptimizerName) -> Check:
    """Check that there is room for the model, its gradients and moments, and what the daemon holds."""
    available, bound = available_memory()
    if report.numel is None:
        return Check(name="memory", ok=True, detail=f"{available / 1e9:.1f} GB available{NEED_UNKNOWN}")
    needed = sum(bytes_in_memory(report.numel, optimizer).values())
    detail = (
        f"{available / 1e9:.1f} GB available, about {needed / 1e9:.1f} GB needed for "
        f"{report.numel / 1e6:.1f} million parameters and {optimizer}"
    )
    more = "give this container or job more memory" if bound else "end other programs"
    remedy = "" if available >= needed else f"{more}, or train on a machine with more"
    return Check(name="memory", ok=available >= needed, detail=detail, remedy=remedy)


def speed(manifest: Manifest, report: TrialReport) -> Check:
    """Report the training speed of this node, from its trial."""
    if not _is_tried(manifest):
        where = "in the agent, which doctor does not start" if manifest.rollouts else "in a process of its user's own"
        return Check(name="speed", ok=True, detail=f"not tried: {manifest.workload.name} trains {where}")
    if report.tokens_per_s is not None:
        roughly = "roughly " if report.steps < FEW_STEPS else ""
        steps = f"{report.steps} step{'' if report.steps == 1 else 's'}"
        detail = f"{roughly}{report.tokens_per_s:,.0f} tokens/s over {steps} on {report.device}{_busy(report)}"
        return Check(name="speed", ok=True, detail=detail, remedy=LONGER if _late(report) else "")
    if _late(report):
        return Check(name="speed", ok=True, detail=f"not measured: {report.error}{_busy(report)}", remedy=LONGER)
    detail, _, remedy = (report.error or "the trial ended early").partition("; ")
    return Check(
        name="speed", ok=False, detail=detail, remedy=remedy or "correct the workload or its options in the manifest"
    )
