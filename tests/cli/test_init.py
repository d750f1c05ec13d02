"""`shoal init` and `shoal id`."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shoal.cli import init as init_command
from shoal.cli.main import execute
from shoal.protocol.identity import Identity
from shoal.protocol.manifest import load_manifest
from shoal.protocol.voting import FaultModel, Voting


def init(tmp_path: Path, *arguments: str) -> int:
    return execute(["init", "--data-dir", str(tmp_path / "node"), "-o", str(tmp_path / "swarm.toml"), *arguments])


def test_init_writes_a_manifest_founded_by_this_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path, "--swarm-name", "barn", "--workload", "regression", "--admission", "open") == 0
    manifest = load_manifest(tmp_path / "swarm.toml")
    node = Identity.load(tmp_path / "node" / "node.key")
    authority = Identity.load(tmp_path / "node" / "authority.key")
    assert manifest.swarm.founders == [node.peer_id]
    assert manifest.swarm.authority == authority.peer_id != node.peer_id
    assert (manifest.swarm.name, manifest.workload.name, manifest.swarm.admission) == ("barn", "regression", "open")
    out, err = capsys.readouterr()
    assert f"`shoal run {tmp_path / 'swarm.toml'} --data-dir {tmp_path / 'node'}`" in out
    assert err == ""


def test_init_for_loops_of_ones_own_says_how_one_takes_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path, "--workload", "own-loop") == 0
    call = f"join(model, optimizer, '{tmp_path}/swarm.toml', data_dir='{tmp_path}/node')"
    assert f"then start your training loop with {call}, which starts the node as well; `shoal run " in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("name", ["wll:Shapes", "wll.deep:Shapes"])
def test_init_says_that_a_module_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert init(tmp_path, "--workload", name) == 0
    note = "note: there is no module 'wll' here; `shoal run` wants it where it starts, or installed"
    assert capsys.readouterr().err == note + look_again(tmp_path, name)


def look_again(folder: Path, name: str) -> str:
    """The end of a note: how to have the code looked at again."""
    options = f"--allow-workload {name} --data-dir {folder / 'node'}"
    return f"; look again with `shoal doctor {folder / 'swarm.toml'} {options}`\n"


OWN = """
import pathlib
pathlib.Path("imported").touch()

class Right:
    metric = "error"
    build = batches = loss = evaluate = print

class Raises(Right):
    def __init__(self):
        self.table = {}["a"]

class Asks(Right):
    def __init__(self, width): ...

class Reads(Right):
    def __init__(self, data): ...
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own:Right", None),
        ("own:Raises", " cannot be made: KeyError: 'a', at {folder}/own.py, line 11; correct its options or its class"),
        ("own:Asks", ": missing a required argument: 'width'; give it in [workload.options], or a default in __init__"),
        ("own:Reads", " reads data; give their path with --data"),
        (
            "lacks:Own",
            " cannot be imported: ModuleNotFoundError: No module named 'nowhere', at {folder}/lacks.py, line ",
        ),
    ],
)
def test_init_tries_the_code_that_its_user_names_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "lacks.py").write_text("import nowhere\n")
    monkeypatch.setattr(init_command, "TRIAL_DEADLINE_S", 200.0)  # on a machine that is busy with tests
    assert init(tmp_path, "--workload", name) == 0
    err = capsys.readouterr().err
    if said is None:
        assert err == ""
    else:
        assert err.startswith(f"note: workload '{name}'{said.format(folder=tmp_path)}")
        assert err.endswith(look_again(tmp_path, name))
    assert (tmp_path / "imported").exists() is name.startswith("own:")
    assert load_manifest(tmp_path / "swarm.toml").workload.name == name


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("class Own\n", "SyntaxError: expected ':' (amiss.py, line 1); correct it"),
        ("x = 1\nx.y\n", "AttributeError: 'int' object has no attribute 'y', at {folder}/amiss.py, line 2; correct it"),
    ],
)
def test_init_refuses_code_that_no_machine_can_import_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "amiss.py").write_text(code)
    monkeypatch.setattr(init_command, "TRIAL_DEADLINE_S", 200.0)  # on a machine that is busy with tests
    assert init(tmp_path, "--workload", "amiss:Own") == 2
    told = said.format(folder=tmp_path)
    assert capsys.readouterr().err == f"shoal: workload 'amiss:Own' cannot be imported: {told}\n"
    assert not (tmp_path / "swarm.toml").exists()
    assert not (tmp_path / "node").exists()


def test_init_imports_nothing_for_an_installed_workload_and_judges_nothing_that_takes_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    assert init(tmp_path, "--workload", "regression") == 0
    monkeypatch.setattr(init_command, "TRIAL_DEADLINE_S", 0.01)
    assert init(tmp_path, "--force", "--workload", "own:Raises") == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "imported").exists()


def test_name_of_a_node_names_a_swarm_as_it_did_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(*arguments: str) -> tuple[str, str]:
        assert init(tmp_path, "--force", *arguments) == 0
        return load_manifest(tmp_path / "swarm.toml").swarm.name, capsys.readouterr().err

    told = "note: the swarm is named 'barn' by --name or SHOAL_NAME, which name a node; write --swarm-name or "
    assert named() == ("shoal", "")
    assert named("--name", "barn") == ("barn", f"{told}SHOAL_SWARM_NAME\n")
    monkeypatch.setenv("SHOAL_NAME", "barn")
    assert named() == ("barn", f"{told}SHOAL_SWARM_NAME\n")
    assert named("--swarm-name", "mill") == ("mill", "")
    monkeypatch.setenv("SHOAL_SWARM_NAME", "mill")
    assert named() == ("mill", "")


def test_init_writes_the_optimizer_that_is_asked_for_where_it_is_the_swarms_to_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--optimizer", "adamw8bit") == 0
    assert load_manifest(tmp_path / "swarm.toml").inner.optimizer == "adamw8bit"
    for arguments, said in (
        (("--workload", "own-loop"), "--optimizer is for workloads, and loops have optimizers of their own; leave it"),
        (("--strategy", "rollouts"), "--optimizer is for workloads, and policies have optimizers of their own; leave"),
        (("--strategy", "ddp"), 'optimizer = "adamw8bit" goes with a strategy of inner steps'),
    ):
        capsys.readouterr()
        assert init(tmp_path, "--force", "--optimizer", "adamw8bit", *arguments) == 2
        assert said in capsys.readouterr().err


def test_init_founds_nothing_that_no_loop_could_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(tmp_path, "--workload", "own-loop", "--strategy", "ddp") == 2
    assert "--strategy ddp: a loop of one's own steps by itself" in capsys.readouterr().err
    assert not (tmp_path / "swarm.toml").exists()


def test_init_of_a_swarm_for_anyone_names_its_voters_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(2)]
    assert init(tmp_path, "--admission", "open", "--founder", others[0], "--founder", others[1]) == 0
    manifest = load_manifest(tmp_path / "swarm.toml")
    node = Identity.load(tmp_path / "node" / "node.key").peer_id
    assert manifest.swarm.founders == [node, *others]
    assert manifest.voting == Voting(named=tuple(sorted(manifest.swarm.founders)))
    out = capsys.readouterr().out
    assert "the 3 founders certify rounds, whoever else contributes, since anyone may join" in out
    assert "one machine with many keys is a majority" in out


@pytest.mark.parametrize("admission", [(), ("--admission", "invite"), ("--admission", "open", "--strategy", "gossip")])
def test_init_names_no_voters_where_people_know_each_other_or_nothing_is_certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], admission: tuple[str, ...]
) -> None:
    assert init(tmp_path, *admission) == 0
    assert load_manifest(tmp_path / "swarm.toml").membership is None
    assert "certif" not in capsys.readouterr().out
    wanted = ("--voters", "contributors", "--admission", "open", "--force")
    assert init(tmp_path, *wanted) == 0
    assert load_manifest(tmp_path / "swarm.toml").voting == Voting()


def test_init_of_lying_voters_takes_four_founders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(3)]
    named = [word for peer in others for word in ("--founder", peer)]
    assert init(tmp_path, "--voters", "named", "--faults", "lying", *named[:4]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "4 founders or more; this has 3: name more, as `shoal id` prints them" in line
    assert not (tmp_path / "swarm.toml").exists()
    assert init(tmp_path, "--voters", "named", "--faults", "lying", *named) == 0
    voting = load_manifest(tmp_path / "swarm.toml").voting
    assert (voting.faults, len(voting.named)) == (FaultModel.LYING, 4)
    assert "the 4 founders certify rounds, whoever else contributes; rounds wait while" in capsys.readouterr().out


@pytest.mark.parametrize("made", [False, True])
def test_commands_close_the_data_folder_to_others_whoever_made_it(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "node"
    if made:
        folder.mkdir()
        folder.chmod(0o755)
    assert init(tmp_path) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)  # as earlier releases left it
    assert execute(["id", "--data-dir", str(folder)]) == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_init_leaves_a_folder_of_all_users_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(0o1777)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert init(tmp_path) == 2
    assert "is shared by all users; choose a folder of its own" in capsys.readouterr().err
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert list(folder.iterdir()) == []


def test_init_overwrites_only_when_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "swarm.toml"
    path.write_text("precious")
    assert init(tmp_path) == 2
    assert path.read_text() == "precious"
    assert not (tmp_path / "node").exists()
    assert capsys.readouterr().err == (
        f"shoal: {path} exists; choose another name with -o, or replace it with --force\n"
    )
    assert init(tmp_path, "--force") == 0
    assert load_manifest(path).swarm.name == "shoal"


def test_init_again_keeps_the_keys(tmp_path: Path) -> None:
    init(tmp_path)
    first = load_manifest(tmp_path / "swarm.toml")
    assert init(tmp_path, "--force") == 0
    assert load_manifest(tmp_path / "swarm.toml") == first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "dilco"], "'dilco' is none of diloco"),
        (["--workload", "../text"], "--workload: '../text' is not installed here; did you mean 'text'?"),
        (["--workload", "regresion"], "--workload: 'regresion' is not installed here; did you mean 'regression'?"),
        (["--workload", "xyzzy"], "installed are causal-lm, "),
        (["--workload", "no good:Class"], "[workload] name"),
        (["--admission", "anyone"], "'--admission'"),
        (["-o", "no/such/folder/swarm.toml"], "there is no folder no/such/folder"),
    ],
)
def test_init_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert init(tmp_path, *arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "swarm.toml").exists()


def test_a_strategy_that_there_is_not_is_told_before_the_file_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path) == 0
    capsys.readouterr()
    assert init(tmp_path, "--strategy", "dilocoo") == 2
    assert capsys.readouterr().err.startswith("shoal: --strategy: 'dilocoo' is none of diloco, ")


def test_id_is_the_same_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert execute(["id", "--data-dir", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == Identity.load(tmp_path / "node.key").peer_id


def test_init_with_few_seats_writes_for_how_long_a_member_may_wait_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path, "--seats", "16") == 0
    manifest = load_manifest(tmp_path / "swarm.toml")
    assert (manifest.seats, manifest.round.staleness_rounds, manifest.longest_wait_rounds) == (16, 6, 6)
    assert (manifest.voting, manifest.round.grace_s) == (Voting(), 10.0)
    for wrong in ("0", "257", "-1"):
        assert init(tmp_path, "--seats", wrong, "--force") == 2
        assert "[membership] seats" in capsys.readouterr().err
    assert init(tmp_path, "--seats", "64", "--force") == 0
    assert load_manifest(tmp_path / "swarm.toml").round.staleness_rounds == 3


@pytest.mark.parametrize(("seats", "staleness"), [("16", 66), ("1", 1000)])
def test_init_where_who_has_no_seat_waits_outside_names_voters_and_keeps_the_work_of_a_thousand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seats: str, staleness: int
) -> None:
    assert init(tmp_path, "--seats", seats, "--waiting", "outside") == 0
    manifest = load_manifest(tmp_path / "swarm.toml")
    assert manifest.waits_outside
    assert len(manifest.voting.named) == 1
    assert manifest.round.staleness_rounds == staleness
    assert init(tmp_path, "--waiting", "outside", "--force") == 2
    assert "name voters and seats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told", "written"),
    [
        (("--workload", "text"), ["# width = 128", "# layers = 4", "# context = 128", '# dtype = "auto"'], {}),
        (("--workload", "causal-lm"), ["# model is needed", '# init = "pretrained"', "# batch = 8"], {}),
        (("--strategy", "rollouts"), ["# width = 96", "# warm_up_updates = 800"], {"style": "rotary"}),
        (("--workload", "char-policy"), ["# width = 96"], {}),
    ],
)
def test_init_names_the_options_of_the_workload_with_their_defaults(
    tmp_path: Path, options: tuple[str, ...], told: list[str], written: dict[str, str]
) -> None:
    assert init(tmp_path, *options) == 0
    _, _, below = (tmp_path / "swarm.toml").read_text().partition("\n[workload.options]\n")
    lines = below.partition("\n\n")[0].splitlines()
    assert [line for line in lines if not line.startswith("# ")] == [f'{key} = "{written[key]}"' for key in written]
    assert set(told) <= set(lines)
    assert not any(line.startswith("# data =") for line in lines)
    assert load_manifest(tmp_path / "swarm.toml").workload.options == written
