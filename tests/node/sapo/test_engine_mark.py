"""The file with the first round that a node has not announced, which its user may have to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.node.sapo.engine import _read_mark
from shoal.protocol.errors import ConfigError


@pytest.mark.parametrize("text", ["12", "12\n"])
def test_mark_that_a_user_wrote_as_told_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "announced"
    assert _read_mark(path) == 0
    path.write_text("torn")
    with pytest.raises(ConfigError, match="write the number of this node's rounds into it"):
        _read_mark(path)
    path.write_text(text)
    assert _read_mark(path) == 12
