"""`shoal amend` and what `shoal status` shows of amended settings."""

from __future__ import annotations

import pytest

from shoal.cli.main import WRONG_USAGE, execute
from shoal.cli.render import settings_lines
from shoal.node.control_client import AmendStatus, BytesStatus, Status


@pytest.mark.parametrize(
    "arguments",
    [[], ["--withdraw", "--set", "inner.lr=1"], ["--withdraw", "--by-authority"], ["--by-authority"]],
)
def test_amend_says_what_to_write(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["amend", *arguments]) == WRONG_USAGE
    assert "write `shoal amend --set SECTION.KEY=VALUE`" in capsys.readouterr().err


def test_status_shows_settings_in_force_and_who_would_amend_what() -> None:
    status = Status(
        peer_id="me",
        swarm_id="5" * 64,
        addresses=[],
        phase="train",
        term="0.0",
        round=3,
        digest=None,
        members=[],
        missing=[],
        amendments=[
            AmendStatus(peer_id="one", settings={"sync.codec": "bf16", "inner.lr": 0.5}, asked=True),
            AmendStatus(peer_id="two", settings={"sync.codec": "bf16\n", "inner.lr": 0.5}, asked=False),
        ],
        settings={"sync.inner_steps": 60},
        loss=None,
        tokens_per_s=None,
        bytes=BytesStatus(sent=0, received=0),
    )
    assert settings_lines(status) == [
        "setting    sync.inner_steps = 60, amended",
        'amendment  one would amend sync.codec = "bf16", inner.lr = 0.5, ordered there',
        'amendment  two would amend sync.codec = "bf16\\n", inner.lr = 0.5, as the authority asks',
    ]
