"""Look at every family of reasoning-gym that is offered: ``python -m tests.node.sapo.sweep_families`` (minutes).

For each: equal questions in two processes, how long a task takes to make, what its own answer is worth in the sandbox,
and that planted answers have no effect. Prints a line per family; the exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal.node.sapo.families import load_choices
from shoal.node.sapo.gym import GymFamily
from shoal.node.sapo.gym_families import OFFERED
from shoal.node.sapo.scoring import Scorer
from shoal.node.sapo.tasks import TaskSource
from shoal.protocol.manifest_rollouts import TaskEntry
from tests.node.sapo.planted import plant, trap

SEEDS = 24
MAKE_LIMIT_S = 1.0
TEXT_LIMIT_S = 0.5


def digests(names: list[str]) -> dict[str, str]:
    """A digest of the questions of each family."""
    found = {}
    for name in names:
        family = GymFamily(name)
        questions = [family.question({}, 104_729 * seed, seed) for seed in range(SEEDS)]
        found[name] = hashlib.sha256(json.dumps(questions).encode()).hexdigest()
    return found


def digests_elsewhere(names: list[str]) -> dict[str, str]:
    """The same from another process with another hash seed, in the opposite order."""
    program = "import json, sys; from tests.node.sapo.sweep_families import digests; "
    program += "print(json.dumps(digests(json.loads(sys.argv[1]))))"
    other = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, json.dumps(names[::-1])],
        env=os.environ | {"PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(other.stdout)
    return found


def main(names: list[str]) -> int:
    """Sweep; return the exit status."""
    wrong: list[str] = []
    here, elsewhere = digests(names), digests_elsewhere(names)
    wrong += [f"{name}: other questions in another process" for name in names if here[name] != elsewhere[name]]
    source = TaskSource(load_choices(TaskEntry(family=name) for name in names))
    with (
        Scorer(source, text_limit_s=TEXT_LIMIT_S) as scorer,
        tempfile.TemporaryDirectory() as folder,
        trap(Path(folder)) as trapped,
    ):
        for name in names:
            family = source.families[name]
            assert isinstance(family, GymFamily)
            began = time.monotonic()
            task = family.make({}, 31_337, 0)
            made_s = time.monotonic() - began
            answer = family._entry({}, 31_337, 0)[1]["answer"]
            right = scorer.score_each([(task, str(answer))])[0] if answer is not None else None
            spoiled = scorer.spoiled
            highest, found = plant(scorer, task, trapped, TEXT_LIMIT_S)
            print(
                f"{name:26} {family.scoring:8} made {made_s:6.3f} s  own answer {right}  planted at most "
                f"{highest:.3f}, {scorer.spoiled - spoiled} stopped",
                flush=True,
            )
            wrong += found
            wrong += [f"{name}: text that is no answer is worth {highest}"] if highest >= 0.5 else []
            wrong += [f"{name}: its own answer is worth {right}"] if right not in (None, 1.0) else []
            wrong += [f"{name}: {made_s:.1f} s for a task"] if made_s > MAKE_LIMIT_S else []
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(OFFERED)))
