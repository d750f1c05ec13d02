"""Names that a user may have meant."""

from __future__ import annotations

import pytest

from shoal.protocol.errors import did_you_mean


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("Shape", "; did you mean 'Shapes'?"),
        ("SHAPES", "; did you mean 'Shapes'?"),
        ("xyzzy", "; it has Shapes, width"),
        ("", "; it has Shapes, width"),
    ],
)
def test_nearest_name_is_offered_whatever_its_case(given: str, hint: str) -> None:
    assert did_you_mean(given, ("Shapes", "width"), "; it has Shapes, width") == hint
