"""The byte GPT sees only the past, starts at 8 bits and learns; its text is split by file and dealt once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.node.workload import Assignment
from shoal.node.workloads import text_data
from shoal.node.workloads.compiling import check_compiler
from shoal.node.workloads.continuing import draw_tokens, sample_generator
from shoal.node.workloads.text import TextWorkload
from shoal.node.workloads.text_data import deal_windows, load_corpus
from shoal.protocol.errors import ConfigError

compiling = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch, of its own modules
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def share(member: int, members: int = 3, round_: int = 1) -> Assignment:
    return Assignment(seed=7, round=round_, member=member, members=members)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        (tmp_path / f"file{number:02}.txt").write_text(f"<{number:02}>" + "the quick brown fox jumps " * 20)
    return tmp_path


def contents(corpus: torch.Tensor) -> set[str]:
    """Which files' marks are in a part of the corpus."""
    text = bytes(corpus.tolist()).decode()
    return {piece[:2] for piece in text.split("<")[1:]}


def test_model_has_the_size_it_says() -> None:
    model = TextWorkload().build()
    assert sum(parameter.numel() for parameter in model.parameters()) == 853_120


@torch.no_grad()
def test_model_starts_at_eight_bits(folder: Path) -> None:
    workload = TextWorkload(width=32, layers=1, context=32, data=str(folder))
    assert workload.evaluate(workload.build()) == pytest.approx(8.0, abs=1e-4)


def untrained(**options: Any) -> tuple[TextWorkload, Any]:
    """A model that is not at 8 bits, in eval mode."""
    torch.manual_seed(3)
    workload = TextWorkload(width=32, layers=2, heads=2, **options)
    model: Any = workload.build()
    torch.nn.init.normal_(model.head.weight)
    return workload, model.eval()


@torch.no_grad()
def test_continuations_are_drawn_from_what_the_model_predicts() -> None:
    workload, model = untrained(context=16)
    *_, texts = workload.continuations(model, ["ab", "x"])
    generator, rows = sample_generator(), [list(b"ab"), list(b"x")]
    for _ in range(16 - 2):  # as far as the context of the longer prompt reaches
        logits = torch.stack([model(torch.tensor([row]))[0, -1] for row in rows])
        for row, symbol in zip(rows, draw_tokens(logits, generator).tolist(), strict=True):
            row.append(symbol)
    assert texts == [bytes(row[start:]).decode(errors="replace") for row, start in zip(rows, (2, 1), strict=True)]


@torch.no_grad()
def test_continuations_are_equal_for_equal_parameters_and_leave_random_numbers_alone() -> None:
    workload, model = untrained(context=32)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = list(workload.continuations(model, workload.prompts))
    assert torch.equal(torch.rand(3), expected)
    assert first == list(workload.continuations(model, workload.prompts))
    assert len(first) == 32 - max(len(prompt) for prompt in workload.prompts)


@torch.no_grad()
def test_prompt_that_fills_the_context_is_not_gone_on_from() -> None:
    workload, model = untrained(context=4)
    assert list(workload.continuations(model, ["abcd"])) == []


def test_training_lowers_bits_per_byte(folder: Path) -> None:
    torch.manual_seed(0)
    workload = TextWorkload(width=32, layers=1, heads=2, context=32, data=str(folder))
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in itertools.islice(workload.batches(share(0, 1)), 60):
        optimizer.zero_grad()
        loss, tokens = workload.loss(model, batch)
        assert tokens == 8 * 32
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        assert workload.evaluate(model) < 2.0


def gradients(workload: TextWorkload, batch: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients, in float32, of the same parameters, whose head is not zero any more."""
    torch.manual_seed(5)
    model = workload.build()
    torch.nn.init.normal_(model.get_parameter("head.weight"), std=0.1)
    loss, _ = workload.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in model.parameters()]
    return loss.item(), [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bf16"}], ids=["float32", "bf16"])
def test_layers_computed_again_have_the_same_gradients_to_the_bit_and_keep_less(
    folder: Path, options: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = {"width": 32, "layers": 3, "heads": 2, "context": 32, "data": str(folder), **options}
    batch = next(TextWorkload(**sizes).batches(share(0, 1)))
    kept = [0, 0]
    results = []
    for again in (False, True):

        def count(tensor: torch.Tensor, again: bool = again) -> torch.Tensor:
            kept[again] += tensor.nbytes
            return tensor

        workload = TextWorkload(gradient_checkpointing=again, **sizes)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            workload.loss(workload.build(), batch)
        results.append(gradients(workload, batch))
    (loss, plain), (other_loss, other) = results
    assert loss == other_loss
    assert len(plain) == len(other) == 3 * 6 + 3
    assert all(one.any() and torch.equal(one, two) for one, two in zip(plain, other, strict=True))
    assert kept[1] < kept[0] / 2


@pytest.mark.long
@compiling
def test_compiled_training_is_the_plain_one_and_evaluates_what_it_learnt(folder: Path) -> None:
    sizes: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch": 4, "data": str(folder)}
    made = []
    for compiled in (False, True):
        workload = TextWorkload(compile=compiled, gradient_checkpointing=compiled, **sizes)
        torch.manual_seed(5)
        model = workload.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for batch in itertools.islice(workload.batches(share(0, 1)), 6):
            optimizer.zero_grad()
            loss, _ = workload.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            made.append((losses, workload.evaluate(model)))
    (plain, value), (other, other_value) = made
    assert plain[-1] < plain[0] - 0.3
    assert other == pytest.approx(plain, rel=1e-4)
    assert other_value == pytest.approx(value, rel=1e-4)


@compiling
def test_without_a_compiler_a_line_says_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = TextWorkload(width=16, layers=1, heads=2, context=16, compile=True, data=str(folder))
    batch = next(workload.batches(share(0, 1)))
    check_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, and there is no (clang|g)\+\+ here; install one"):
        workload.loss(workload.build(), batch)
    monkeypatch.setenv("CC", "some-cc")
    with pytest.raises(ConfigError, match="needs a C compiler, and there is no some-cc here"):
        check_compiler("cuda")
    monkeypatch.setenv("CXX", "/bin/sh")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="needs the headers of Python"):
        check_compiler("cpu")


def test_split_is_by_file_and_blind_to_the_root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    corpus = load_corpus(str(folder))
    train, held_out = contents(corpus.train), contents(corpus.held_out)
    assert train.isdisjoint(held_out)
    assert len(train) + len(held_out) == 40
    assert 1 <= len(held_out) <= 8
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    folder.rename(elsewhere)
    assert torch.equal(load_corpus(str(elsewhere)).train, corpus.train)


def test_hidden_and_binary_files_are_left_out(folder: Path) -> None:
    before = load_corpus(str(folder))
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "image.bin").write_bytes(b"\x89\0\0" * 100)
    after = load_corpus(str(folder))
    assert len(after.train) + len(after.held_out) == len(before.train) + len(before.held_out)


def test_reading_stops_at_the_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data, "TRAIN_LIMIT_BYTES", 1000)
    monkeypatch.setattr(text_data, "HELD_OUT_LIMIT_BYTES", 100)
    corpus = load_corpus(str(folder))
    assert (len(corpus.train), len(corpus.held_out)) == (1000, 100)


def test_single_file_holds_out_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(32, 132)) * 2)
    corpus = load_corpus(str(path))
    assert bytes(corpus.train.tolist() + corpus.held_out.tolist()) == path.read_bytes()
    assert len(corpus.held_out) == 10
    alone = load_corpus(str(tmp_path))
    assert (alone.train.tolist(), alone.held_out.tolist()) == (corpus.train.tolist(), corpus.held_out.tolist())


def test_default_text_is_the_standard_library() -> None:
    corpus = load_corpus(None)
    assert len(corpus.train) > 5_000_000
    assert len(corpus.held_out) > 100_000


@pytest.mark.parametrize("round_", [1, 2])
def test_windows_of_members_are_disjoint_and_complete(round_: int) -> None:
    dealt = [list(itertools.islice(deal_windows(30, share(member, 3, round_)), 10)) for member in range(3)]
    assert sorted(itertools.chain(*dealt)) == list(range(30))


def test_windows_of_outsiders_are_no_members_and_no_other_outsiders_while_there_are_any() -> None:
    """Of 1000 windows three members read 100 each, and two outsiders, of neighbouring lanes, ten each."""
    members = [set(itertools.islice(deal_windows(1000, share(member)), 100)) for member in range(3)]
    outside = [set(itertools.islice(deal_windows(1000, share(member)), 10)) for member in (3, 4)]
    assert len(set().union(*members, *outside)) == 3 * 100 + 2 * 10


def test_windows_of_an_outsider_are_all_of_them_in_an_order_of_its_own() -> None:
    dealt = [list(itertools.islice(deal_windows(30, share(m)), 30)) for m in (3, 4, 1 << 20)]
    assert all(sorted(windows) == list(range(30)) for windows in dealt)
    assert dealt[0] != dealt[1] != dealt[2]


def test_windows_fewer_than_members_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 windows of text for 3 members"):
        next(deal_windows(2, share(0)))


def test_windows_are_shuffled_anew_each_round() -> None:
    first, second = (list(itertools.islice(deal_windows(30, share(0, 3, r)), 10)) for r in (1, 2))
    assert first != second


def test_missing_and_empty_text_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --data the path"):
        load_corpus(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"too little text .*; give a file, or a folder of two text files or more"):
        load_corpus(str(tmp_path))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"too little text .*; give a longer file"):
        load_corpus(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize("options", [{"width": 0}, {"layers": -1}, {"width": 36, "heads": 4}])
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="workload 'text'"):
        TextWorkload(**options)
