"""The small GPT: it sees only the past, with a cache and without, and checkpoints of it mean what they meant."""

from __future__ import annotations

import pytest
import torch

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.workloads.gpt import Gpt, GptSettings, Style, rotate
from shoal.node.workloads.text import TextWorkload

STYLES: tuple[Style, ...] = ("rotary", "learned")


def new_gpt(style: Style, *, width: int = 32, layers: int = 2, heads: int = 2, context: int = 16) -> Gpt:
    """A model whose every weight counts."""
    torch.manual_seed(0)
    settings = GptSettings(vocabulary=40, width=width, layers=layers, heads=heads, context=context, style=style)
    model = Gpt(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_model_sees_no_future(style: Style) -> None:
    model = new_gpt(style)
    tokens = torch.randint(0, 40, (1, 16))
    changed = tokens.clone()
    changed[0, 9] ^= 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amin(dim=-1).ne(0).all()


@pytest.mark.parametrize("style", STYLES)
@torch.no_grad()
def test_reading_on_with_a_cache_is_reading_all_at_once(style: Style) -> None:
    """Contexts of unlike lengths, of which one is left out and one is taken up twice on the way."""
    model = new_gpt(style)
    rows = [torch.randint(0, 40, (length,)).tolist() for length in (3, 7, 5, 6)]
    logits, cache = model.prefill(rows, room=4)
    for row, found in zip(rows, logits, strict=True):
        assert torch.allclose(found, model(torch.tensor([row]))[0, -1], atol=1e-5)
    kept = [2, 3, 0, 0]
    cache.keep(torch.tensor(kept))
    rows = [list(rows[at]) for at in kept]
    for _ in range(4):
        more = torch.randint(0, 40, (4, 1))
        logits = model.step(more, cache)
        for row, token, found in zip(rows, more[:, 0].tolist(), logits, strict=True):
            row.append(token)
            assert torch.allclose(found, model(torch.tensor([row]))[0, -1], atol=1e-5)
    assert cache.lengths.tolist() == [len(row) for row in rows] == [9, 10, 7, 7]


@torch.no_grad()
def test_contexts_of_unlike_lengths_are_read_in_bf16_too() -> None:
    model = new_gpt("learned")
    rows = [torch.randint(0, 40, (length,)).tolist() for length in (2, 7)]
    with torch.autocast("cpu", torch.bfloat16):
        logits, cache = model.prefill(rows, room=1)
        after = model.step(torch.tensor([[3], [4]]), cache)
    for found, more in ((logits, [[], []]), (after, [[3], [4]])):
        for row, one, added in zip(rows, found, more, strict=True):
            assert torch.allclose(one.float(), model(torch.tensor([row + added]))[0, -1], atol=0.1)


def test_rotation_makes_products_depend_on_distance_alone() -> None:
    model = new_gpt("rotary", width=8, layers=1, heads=1, context=32)
    query, key = torch.randn(2, 1, 1, 1, 8).unbind()
    turned = [rotate(x.expand(1, 1, 32, 8), model.cos, model.sin)[0, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    assert products[5, 2].item() == pytest.approx(products[25, 22].item(), abs=1e-4)
    assert turned[0].norm(dim=-1).allclose(query.norm())


# -- what lies in checkpoints --------------------------------------------------------------------------------------

TEXT = [
    ("embed.weight", (256, 32)),
    ("blocks.0.norm_attention.weight", (32,)),
    ("blocks.0.query_key_value.weight", (96, 32)),
    ("blocks.0.project.weight", (32, 32)),
    ("blocks.0.norm_perceptron.weight", (32,)),
    ("blocks.0.up.weight", (128, 32)),
    ("blocks.0.down.weight", (32, 128)),
    ("norm.weight", (32,)),
    ("head.weight", (256, 32)),
]
CHARS = [
    ("embed.weight", (18, 16)),
    ("position.weight", (21, 16)),
    ("blocks.0.norm_1.weight", (16,)),
    ("blocks.0.norm_1.bias", (16,)),
    ("blocks.0.norm_2.weight", (16,)),
    ("blocks.0.norm_2.bias", (16,)),
    ("blocks.0.qkv.weight", (48, 16)),
    ("blocks.0.out.weight", (16, 16)),
    ("blocks.0.up.weight", (64, 16)),
    ("blocks.0.up.bias", (64,)),
    ("blocks.0.down.weight", (16, 64)),
    ("blocks.0.down.bias", (16,)),
    ("norm.weight", (16,)),
    ("norm.bias", (16,)),
    ("head.weight", (18, 16)),
]

GOLDEN_TEXT = [-0.09417, -0.08093, 0.05304, 0.48586]
GOLDEN_CHARS = [0.11915, -0.12662, 0.22255, 0.44844]
GOLDEN_TEXT_START = [-0.1557514, 0.1069552, 0.2463592]
GOLDEN_CHARS_START = [0.039121, -0.0079502, 0.0047917]
"""As an earlier version computed them."""


def ramp(model: torch.nn.Module) -> None:
    """Fill every parameter with values that follow from its place alone."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), start=1):
            places = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter.copy_(torch.sin(places**2 * 0.37 + number).view(parameter.shape) * 0.4)


@torch.no_grad()
def test_checkpoints_of_the_workload_text_mean_what_they_meant() -> None:
    model = TextWorkload(width=32, layers=1, heads=2, context=16).build()
    assert [(name, tuple(value.shape)) for name, value in model.state_dict().items()] == TEXT
    ramp(model)
    found = model(torch.arange(16)[None] * 7)
    assert found[0, ::5, 3].tolist() == pytest.approx(GOLDEN_TEXT, abs=1e-4)


@torch.no_grad()
def test_files_of_the_char_policy_mean_what_they_meant() -> None:
    settings = CharModelSettings(
        width=16, layers=1, heads=2, prompt_chars=12, completion_tokens=8, alphabet="0123456789+= -"
    )
    model = CharPolicy(settings, seed=1).model
    assert [(name, tuple(value.shape)) for name, value in model.state_dict().items()] == CHARS
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in CHARS]  # files have them by number
    ramp(model)
    found = model.head(model.hidden(torch.arange(18)[None]))
    assert found[0, ::5, 3].tolist() == pytest.approx(GOLDEN_CHARS, abs=1e-4)


def test_models_begin_where_they_began() -> None:
    """A founder of an old version and one of this version have the same first state."""
    torch.manual_seed(5)
    text = TextWorkload(width=32, layers=1, heads=2, context=16).build()
    chars = CharPolicy(CharModelSettings(width=16, layers=1, heads=2, alphabet="01"), seed=1).model
    assert text.blocks[0].project.weight[0, :3].tolist() == pytest.approx(GOLDEN_TEXT_START, abs=1e-6)
    assert chars.blocks[0].out.weight[0, :3].tolist() == pytest.approx(GOLDEN_CHARS_START, abs=1e-6)
    assert not text.head.weight.any()
