"""The entry point of trainers: daemons come before what they compute."""

from __future__ import annotations

import os

import pytest

from shoal.node.training import trainer_process, trainer_start


def test_trainer_and_all_its_processes_give_way_to_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def serve(control: int, memory: int, *, import_s: float, ranks: object) -> int:
        steps.append(f"serves {control} {memory}")
        return 7

    monkeypatch.setattr(os, "nice", lambda by: steps.append(f"gives way by {by}"))
    monkeypatch.setattr(trainer_start, "Ranks", lambda processes: steps.append(f"{processes} processes"))
    monkeypatch.setattr(trainer_process, "serve", serve)
    assert trainer_start.main(["3", "4", "2"]) == 7
    assert steps == [f"gives way by {trainer_start.GIVES_WAY}", "2 processes", "serves 3 4"]
