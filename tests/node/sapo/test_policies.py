"""Policies by name: what is made, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from shoal.node.sapo.policies import PolicyLimits, installed_policies, load_policy, whole
from shoal.node.sapo.policy import Policy
from shoal.node.training.trainer_messages import Scalar
from shoal.protocol.errors import ConfigError
from tests.node.sapo.agent_lab import TINY_POLICY

LIMITS = PolicyLimits(seed=1, completion_tokens=7, temperature=0.5)


def test_built_in_policy_follows_from_options_and_limits() -> None:
    assert "char-policy" in installed_policies()
    one, same = (load_policy("char-policy", TINY_POLICY).build(LIMITS) for _ in range(2))
    assert len(one.encode_completion(20 * "1") or ()) == 7
    assert all(bool((a == b).all()) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    other = load_policy("char-policy", TINY_POLICY).build(PolicyLimits(seed=2, completion_tokens=7, temperature=0.5))
    assert any(bool((a != b).any()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_warm_up_is_an_option() -> None:
    assert load_policy("char-policy", {"warm_up_updates": 0}).warm_up is None
    taught = load_policy("char-policy", {"warm_up_updates": 3, "warm_up_reward": 0.5}).warm_up
    assert taught is not None
    assert (taught.updates, taught.reward) == (3, 0.5)


def test_policy_of_transformers_is_loaded_from_the_nodes_own_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.node.sapo.test_causal_lm_policy import new_model, new_tokenizer

    folder = tmp_path / "models" / "tiny"
    new_model().save_pretrained(folder)  # type: ignore[operator]
    new_tokenizer().save_pretrained(folder)
    limits = PolicyLimits(seed=1, completion_tokens=5, temperature=1.0, device="cpu", data=str(tmp_path))
    policy = load_policy("causal-lm-policy", {"model": "tiny", "prompt_tokens": 8}).build(limits)
    assert policy.decode(policy.encode_completion("1+2") or ()) == "1+2"
    assert all(bool((a == b).all()) for a, b in zip(policy.parameters(), new_model().parameters(), strict=True))


@pytest.mark.parametrize("member", ["completion_limit", "encode_reply", "drawn_by"])
def test_policy_of_an_earlier_release_is_told_of_at_the_start(member: str) -> None:
    policy = load_policy("char-policy", TINY_POLICY).build(LIMITS)
    assert whole("mine", policy) is policy

    class Earlier:
        def __getattr__(self, name: str) -> object:
            if name == member:
                raise AttributeError(name)
            return getattr(policy, name)

    with pytest.raises(ConfigError, match=f"policy 'mine' has no {member}"):
        whole("mine", cast(Policy, Earlier()))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("chr-policy", {}, "unknown policy 'chr-policy'; did you mean 'char-policy'?"),
        ("char-policy", {"widht": 3}, "has no option 'widht'; did you mean 'width'?"),
        ("char-policy", {"width": 10, "heads": 4}, "must be a multiple of its heads, 4"),
        ("char-policy", {"width": 1.5}, "width is 1.5, expected a whole number from 1 to 16384"),
        ("char-policy", {"width": True}, "width is True, expected a whole number from 1"),
        (
            "char-policy",
            {"layers": 10**9},
            "policy 'char-policy': layers is 1000000000, expected a whole number from 1",
        ),
        ("char-policy", {"prompt_chars": 10**9}, "prompt_chars is 1000000000, expected a whole number from 1 to 8192"),
        ("char-policy", {"warm_up_updates": -1}, "warm_up_updates is -1, expected a whole number from 0 to 100000"),
        ("causal-lm-policy", {"model": "m", "lora_rank": 9999}, "lora_rank is 9999, expected a whole number from 0 to"),
        ("char-policy", {"alphabet": "aa"}, "each of them once"),
        ("char-policy", {"warm_up_reward": 2.0}, "a warm-up needs a reward of 0 to 1"),
    ],
)
def test_policy_that_cannot_be_made_is_said_in_one_line(name: str, options: dict[str, Scalar], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(name, options).build(LIMITS)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_installed_policy_is_loaded_and_a_broken_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    information = tmp_path / "own_policies-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-policies\nVersion: 1\n")
    places = {"mine": "own:Mine", "broken": "own:Broken", "gone": "own_gone:Mine", "empty": "own:Empty"}
    points = "\n".join(f"{name} = {place}" for name, place in places.items())
    (information / "entry_points.txt").write_text(f"[shoal.policies]\n{points}\n")
    (tmp_path / "own.py").write_text(
        "class Mine:\n    warm_up = None\n    def build(self, limits):\n        return limits\n"
        "class Broken:\n    def __init__(self):\n        raise ValueError('no such file')\n"
        "class Empty:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {"mine", "broken", "char-policy"} <= set(installed_policies())
    assert load_policy("mine", {}).build(LIMITS) is LIMITS
    reasons = {
        "broken": "ValueError: no such file",
        "gone": "there is no module 'own_gone'",
        "empty": "no method build",
    }
    for name, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            load_policy(name, {})
