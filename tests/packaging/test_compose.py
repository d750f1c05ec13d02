"""`deploy/compose.yaml`: true to the command line, the container's file and the dashboard, and, long, its lines run.

The lines run in network namespaces in place of containers, with folders in place of volumes, and with a workload whose
rounds are short.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from shoal.cli.commands import app_of
from shoal.node.dashboard.token import TOKEN_NAME
from shoal.testnet.links.namespaces import network
from tests.node.lab import eventually
from tests.packaging.test_service_files import CONTAINER, deployed, entry_point, options_in, run_options, service
from tests.testnet.links_lab import needs_namespaces

DEPLOY = Path(__file__).parents[2] / "deploy"
NODES = ("one", "two", "three")
HOME = "/home/shoal"
"""Where the manifest lies: the home of the image's user, so that what is mounted there is that user's."""
ROUNDS = 3


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def services() -> dict[str, Any]:
    found: dict[str, Any] = read("compose.yaml")["services"]
    return found


def line_of(service: str) -> str:
    """The shell's line of a service, as the shell gets it."""
    (line,) = services()[service]["command"]
    return str(line).replace("$$", "$")


def test_nodes_are_run_as_the_image_runs_one_but_for_where_the_manifest_is_and_whom_they_join() -> None:
    for name in NODES:
        words = shlex.split(line_of(name).replace("\\\n", " "))
        assert options_in(words) <= run_options()
        at = words.index("--join")
        address = services()["one"]["networks"]["swarm"]["ipv4_address"]
        assert words[at + 1] == f"/ip4/{address}/tcp/4001/p2p/$(cat {HOME}/one)"
        alike = [*words[1:at], *words[at + 2 :]]
        assert alike == [word.replace("/swarm/swarm.toml", f"{HOME}/swarm.toml") for word in entry_point()]
        assert services()[name]["entrypoint"] == ["sh", "-c"]
        assert services()[name]["hostname"] == name  # the guard of its page knows it by that
        assert services()[name]["ulimits"]["nofile"] == int(service()["LimitNOFILE"][0])
        assert services()[name]["stop_grace_period"] == f"{service()['TimeoutStopSec'][0]}s"
    init = shlex.split(next(line for line in line_of("found").splitlines() if line.startswith("shoal init")))
    command = get_command(app_of()).get_command(None, "init")  # type: ignore[attr-defined]
    assert options_in(init) <= {name for parameter in command.params for name in parameter.opts}


def test_volumes_networks_and_files_are_there_and_nothing_listens_beyond_this_machine() -> None:
    composed = read("compose.yaml")
    for name, one in services().items():
        for volume in one["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith("./") else source in composed["volumes"], name
        assert all(port.startswith("127.0.0.1:") for port in one.get("ports", ()))
    published = [port.split(":")[1] for one in services().values() for port in one.get("ports", ())]
    assert len(published) == len(set(published)) == 5
    addresses = [services()[name]["networks"]["swarm"]["ipv4_address"] for name in NODES]
    assert len(set(addresses)) == 3
    assert composed["x-node"]["build"]["dockerfile"] == f"deploy/{CONTAINER}"


def test_prometheus_asks_each_node_with_its_token_as_the_user_who_may_read_it() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus.yml")["scrape_configs"]}
    assert set(jobs) == set(NODES)
    prometheus = services()["prometheus"]
    for name, job in jobs.items():
        assert job["static_configs"] == [{"targets": [f"{services()[name]['hostname']}:8420"]}]
        assert job["authorization"] == {"credentials_file": f"/{name}/data/{TOKEN_NAME}"}
        assert f"{name}:/{name}:ro" in prometheus["volumes"]
        assert f"{name}:/swarm" in services()[name]["volumes"]
    assert re.search(rf"useradd --uid {prometheus['user']} ", deployed(CONTAINER))


def test_grafana_has_the_dashboard_and_where_its_figures_are() -> None:
    (source,) = read("grafana-source.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"][0]["query"]
    (provider,) = read("grafana-boards.yaml")["providers"]
    assert f"./grafana.json:{provider['options']['path']}/shoal.json:ro" in services()["grafana"]["volumes"]


def test_programs_that_read_these_files_understand_them(tmp_path: Path) -> None:
    programs = {name: shutil.which(name) for name in ("docker-compose", "promtool")}
    if not all(programs.values()):
        pytest.skip("docker-compose and promtool are not installed")
    compose = [str(programs["docker-compose"]), "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    subprocess.run(compose, check=True, capture_output=True, timeout=120)
    text = (DEPLOY / "prometheus.yml").read_text()
    for name in NODES:
        token = tmp_path / name / "data" / TOKEN_NAME
        token.parent.mkdir(parents=True)
        token.write_text("token")
        text = text.replace(f"/{name}/data", f"{tmp_path}/{name}/data")
    (tmp_path / "prometheus.yml").write_text(text)
    check = [str(programs["promtool"]), "check", "config", str(tmp_path / "prometheus.yml")]
    subprocess.run(check, check=True, capture_output=True, timeout=120)


def certified(data: Path) -> list[dict[str, Any]]:
    try:
        *lines, _ = (data / "events.jsonl").read_text().split("\n")
    except FileNotFoundError:
        return []
    return [event for event in map(json.loads, lines) if event["event"] == "certified"]


@pytest.mark.long
@needs_namespaces
def test_lines_of_the_file_make_a_swarm_of_three_that_prometheus_can_ask(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shared = tmp_path / "shared"
    shared.mkdir()
    with network(len(NODES)) as net:

        def started(service: str, index: int) -> subprocess.Popen[bytes]:
            folder = tmp_path / ("one" if service == "found" else service)
            folder.mkdir(exist_ok=True)
            line = line_of(service).replace(HOME, str(shared)).replace("/swarm/data", f"{folder}/data")
            line = line.replace("shoal init ", "shoal init --workload regression ")
            line = line.replace(services()["one"]["networks"]["swarm"]["ipv4_address"], net.place(0).host)
            with (tmp_path / f"{service}.log").open("wb") as log:
                return subprocess.Popen(
                    [*net.place(index).enter, "sh", "-c", line],
                    env={"PATH": path, "HOME": str(tmp_path / "home"), "LANG": "C.UTF-8"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

        assert started("found", 0).wait(300) == 0
        manifest = (shared / "swarm.toml").read_bytes()
        assert started("found", 0).wait(300) == 0  # the next `up` founds no other swarm
        assert (shared / "swarm.toml").read_bytes() == manifest
        processes = [started(name, index) for index, name in enumerate(NODES)]
        try:

            def of_all() -> bool:
                for process, name in zip(processes, NODES, strict=True):
                    assert process.poll() is None, (tmp_path / f"{name}.log").read_text()[-4000:]
                rounds = [
                    [event["round"] for event in certified(tmp_path / name / "data") if len(event["members"]) == 3]
                    for name in NODES
                ]
                return all(len(found) >= ROUNDS for found in rounds)

            eventually(of_all, f"{ROUNDS} rounds of all three", deadline_s=600)
            for index, name in enumerate(NODES):
                token = (tmp_path / name / "data" / TOKEN_NAME).read_text().strip()
                code = (
                    "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1],"
                    " headers={'Authorization': 'Bearer ' + sys.argv[2]}), timeout=30).read().decode())"
                )
                url = f"http://{net.place(index).host}:8420/metrics"
                ask = [*net.place(0).enter, sys.executable, "-c", code, url, token]
                told = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout
                (round,) = re.findall(r"^shoal_round(?:\{[^}]*\})? (\d+)", told, re.MULTILINE)
                assert int(round) >= ROUNDS
        finally:
            for process in processes:
                process.kill()
                process.wait()
