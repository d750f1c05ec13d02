"""Names become workloads, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from shoal.node.training.trainer_messages import Scalar
from shoal.node.workload import installed_workloads, load_workload
from shoal.node.workloads.regression import RegressionWorkload
from shoal.node.workloads.text import TextWorkload
from shoal.protocol.errors import ConfigError

OWN = """
class Own:
    metric = "error"
    def __init__(self, *, size, depth=2): self.size = size
    def build(self): ...
    def batches(self, assignment): ...
    def loss(self, model, batch): ...
    def evaluate(self, model): ...

class Raises(Own):
    def __init__(self): raise OSError("the disk is\\n upside down")

class Lacks:
    metric = "error"
    def build(self): ...
    def batches(self, assignment): ...
    def loss(self, model, batch): ...
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shoal_test_own.py").write_text(OWN)
    (tmp_path / "shoal_test_broken.py").write_text("import no_such_module_anywhere\n")
    return "shoal_test_own"


def complaint(name: str, data: str | None = None, **options: Scalar) -> str:
    with pytest.raises(ConfigError) as caught:
        load_workload(name, options, data)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_loader_makes_installed_workloads_with_their_options() -> None:
    assert load_workload("regression", {"inputs": 3}, None) == RegressionWorkload(inputs=3)
    assert load_workload("text", {"width": 64}, "somewhere") == TextWorkload(width=64, data="somewhere")
    assert {"regression", "text"} <= set(installed_workloads())


def test_loader_imports_from_the_current_directory(own_module: str) -> None:
    workload = load_workload(f"{own_module}:Own", {"size": 5}, None)
    assert workload.size == 5  # type: ignore[attr-defined]


def test_loader_does_not_let_the_current_directory_shadow_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "fractions", raising=False)
    (tmp_path / "fractions.py").write_text("class Impostor: ...\n")
    assert "has no class 'Impostor'" in complaint("fractions:Impostor")


def test_unknown_name_is_answered_with_the_nearest() -> None:
    assert "did you mean 'regression'?" in complaint("regresion")


def test_unknown_option_is_answered_with_the_nearest(own_module: str) -> None:
    assert complaint("text", widht=64).endswith("has no option 'widht'; did you mean 'width'?")
    assert complaint(f"{own_module}:Own", size=1, depht=3).endswith("did you mean 'depth'?")


def test_missing_option_is_named(own_module: str) -> None:
    text = complaint(f"{own_module}:Own")
    assert text.endswith("'size'; give it in [workload.options], or a default in __init__")


def test_syntax_error_is_to_be_corrected(own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shoal_test_misspelt.py").write_text("class Own\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = complaint("shoal_test_misspelt:Own")
    assert "cannot be imported: SyntaxError: expected ':' (shoal_test_misspelt.py, line 1); correct it" in text


def test_import_error_carries_its_cause(own_module: str) -> None:
    text = complaint("shoal_test_broken:Own")
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere'" in text


def test_a_module_that_is_not_there_is_one_line_without_a_cause() -> None:
    for name in ("shoal_test_no_such:Own", "shoal_test_no_such.inner:Own"):
        with pytest.raises(ConfigError, match="there is no module 'shoal_test_no_such'; start this where") as caught:
            load_workload(name, {}, None)
        assert caught.value.__cause__ is None  # so the trainer sends no traceback


def test_missing_class_is_answered_with_the_nearest(own_module: str) -> None:
    assert "has no class 'Owm'; did you mean 'Own'?" in complaint(f"{own_module}:Owm")


def test_raising_constructor_is_told_in_one_line(own_module: str) -> None:
    text = complaint(f"{own_module}:Raises")
    assert re.search(
        r"cannot be made: OSError: the disk is upside down, at .*\.py, line \d+; correct its options or its class$",
        text,
    )


def test_missing_method_is_named(own_module: str) -> None:
    assert "has no method evaluate()" in complaint(f"{own_module}:Lacks")


def test_name_of_wrong_form_is_refused() -> None:
    assert "module:Class" in complaint("os:system('true')")


def test_data_path_is_never_the_manifests() -> None:
    with pytest.raises(ConfigError, match="a manifest cannot say where data lie"):
        load_workload("text", {"data": "/etc"}, None)


def test_data_path_without_use_is_refused() -> None:
    assert "reads no data" in complaint("regression", data="/tmp")
