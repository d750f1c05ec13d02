"""The `causal-lm` workload on a model and a tokenizer that are made here: nothing is fetched.

Skipped where the extra `shoal[hf]` is not installed.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.trainer_messages import Assignment
from shoal.node.workload import load_workload
from shoal.node.workloads.causal_lm import CausalLMWorkload
from shoal.node.workloads.causal_lm_data import (
    SHUFFLE_BUFFER,
    Documents,
    Hub,
    _Stream,
    held_out_texts,
    is_held_out,
    local_files,
    open_documents,
    pack,
    training_texts,
)
from shoal.node.workloads.causal_lm_model import load_tokenizer
from shoal.node.workloads.continuing import draw_tokens, sample_generator
from shoal.protocol.errors import ConfigError

pytestmark = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("datasets")), reason="the extra shoal[hf] is not installed"
)
"""Not imported to find out, which takes seconds: every process that runs tests imports this module."""

compiling = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch, of its own modules
WORDS = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")
DOCUMENTS = 200
END = "<|end|>"
LENGTH = 16


def sentence(number: int) -> str:
    """A text of 12 words that can be learnt, and differs from others."""
    return " ".join(WORDS[(number + step * (number % 3 + 1)) % 8] for step in range(12)) + f" {number}"


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    for name in ("transformers", "datasets"):
        pytest.importorskip(name)  # which warn


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No network, caches in a folder of the test, one thread; small tensors gain nothing by more."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def save_tokenizer(folder: Path) -> None:
    """Train a tokenizer that knows whole words, on the sentences, and save it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.trainers import WordLevelTrainer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(vocab_size=64, special_tokens=["?", END], show_progress=False)
    tokenizer.train_from_iterator([sentence(number) for number in range(DOCUMENTS)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token=END).save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `own/gpt2`, of tied weights, and `llama`, each with a tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    root = tmp_path_factory.mktemp("data")
    torch.manual_seed(5)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    gpt2.save_pretrained(root / "models" / "own" / "gpt2")
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )
    llama.save_pretrained(root / "models" / "llama")
    for name in ("own/gpt2", "llama"):
        save_tokenizer(root / "models" / name)
    (root / "part [1].jsonl").write_text(
        "".join(json.dumps({"id": number, "text": sentence(number)}) + "\n" for number in range(DOCUMENTS))
    )
    return root


def workload(data: Path, **options: Any) -> CausalLMWorkload:
    """The workload on the small GPT-2, in float32 unless told otherwise."""
    settings = {"model": "own/gpt2", "sequence_length": LENGTH, "batch": 4, "bf16": False} | options
    made = load_workload("shoal.node.workloads.causal_lm:CausalLMWorkload", settings, str(data))
    assert isinstance(made, CausalLMWorkload)
    return made


def share(member: int, members: int = 3, round_: int = 1) -> Assignment:
    return Assignment(seed=7, round=round_, member=member, members=members)


def table(data: Path, **options: Any) -> Documents:
    return open_documents(data=str(data), hub=None, **({"column": "text", "sample_by": "paragraph"} | options))


def stream(tmp_path: Path, *, files: int, row_group: int = 10) -> Documents:
    """The sentences as a stream of Parquet files, as the Hub gives them."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    size = DOCUMENTS // files
    for file in range(files):
        texts = [sentence(number) for number in range(file * size, (file + 1) * size)]
        path = tmp_path / f"{file}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=row_group)
    paths = sorted(str(path) for path in tmp_path.glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)
    return _Stream(rows, "text", what="the stream")


def numbers(texts: Iterator[str]) -> list[int]:
    """Which sentences these are."""
    return [int(text.split()[-1]) for text in texts]


def test_packing_is_exact() -> None:
    documents = {"a": [5, 6, 7], "b": [], "c": [8, 9, 10, 11, 12], "d": [13]}
    blocks = list(pack(iter(documents), lambda texts: [documents[text] for text in texts], end=1, length=4))
    assert [block.tolist() for block in blocks] == [[5, 6, 7, 1], [1, 8, 9, 10], [11, 12, 1, 13]]
    assert all(block.dtype == torch.int64 for block in blocks)


def test_packing_goes_on_over_reads() -> None:
    blocks = list(pack(map(str, range(100)), lambda texts: [[int(text)] for text in texts], end=-1, length=7))
    flat = [token for block in blocks for token in block.tolist()]
    assert flat == [token for number in range(100) for token in (number, -1)][: len(flat)]
    assert len(flat) == 196


def test_batches_hold_the_tokens_of_whole_documents(models: Path) -> None:
    made = workload(models)
    batch = next(made.batches(share(0, 1)))
    assert batch.shape == (4, LENGTH)
    texts = itertools.islice(training_texts(table(models), share(0, 1)), 5)
    expected = [
        token for text in texts for token in [*made._tokenizer(text)["input_ids"], made._tokenizer.eos_token_id]
    ]
    assert batch.flatten().tolist() == expected[: 4 * LENGTH]


@pytest.mark.parametrize("round_", [1, 2])
def test_shares_of_a_table_are_disjoint_and_cover_it(models: Path, round_: int) -> None:
    source = table(models)
    shares = [numbers(source.share(share(member, 3, round_), 0)) for member in range(3)]
    assert sorted(itertools.chain(*shares)) == list(range(DOCUMENTS))
    assert shares[0] != sorted(shares[0])


@pytest.mark.parametrize(
    ("files", "row_group"), [(1, 10), (4, 10), (1, DOCUMENTS)], ids=["groups", "files", "one shard"]
)
def test_shares_of_a_stream_are_disjoint_and_cover_it(tmp_path: Path, files: int, row_group: int) -> None:
    source = stream(tmp_path, files=files, row_group=row_group)
    for round_ in (1, 2):
        shares = [numbers(source.share(share(member, 3, round_), 0)) for member in range(3)]
        assert sorted(itertools.chain(*shares)) == list(range(DOCUMENTS))
        assert all(len(own) >= DOCUMENTS // 4 for own in shares)


def test_shards_of_a_stream_change_hands_each_round(tmp_path: Path) -> None:
    source = stream(tmp_path, files=4)
    rounds = [numbers(source.share(share(0, 3, round_), 0)) for round_ in (1, 2, 3)]
    assert sorted(itertools.chain(*rounds)) == list(range(DOCUMENTS))


def test_stream_is_shuffled_by_shards_and_within_them(tmp_path: Path) -> None:
    source = stream(tmp_path, files=4)
    own, later = (numbers(source.share(share(0), turn)) for turn in (0, 1))
    assert own != sorted(own)
    assert own != later
    assert sorted(own) == sorted(later)
    assert SHUFFLE_BUFFER >= DOCUMENTS


def test_equal_assignments_give_equal_batches(models: Path) -> None:
    first, second = (list(itertools.islice(workload(models).batches(share(1)), 6)) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    elsewhere = next(workload(models).batches(share(1, round_=2)))
    assert not torch.equal(first[0], elsewhere)


@pytest.mark.parametrize("kind", ["table", "row groups", "one shard"])
def test_later_passes_stay_in_the_share(models: Path, tmp_path: Path, kind: str) -> None:
    row_group = DOCUMENTS if kind == "one shard" else 10
    source = table(models) if kind == "table" else stream(tmp_path, files=1, row_group=row_group)
    texts = list(itertools.islice(training_texts(source, share(2)), DOCUMENTS))
    own = [text for text in source.share(share(2), 0) if not is_held_out(text)]
    assert texts[: len(own)] == own
    again = texts[len(own) : 2 * len(own)]
    assert sorted(again) == sorted(own)
    assert (again == own) is (kind == "one shard")


def test_outsiders_draw_from_orders_of_their_own(models: Path, tmp_path: Path) -> None:
    for source in (table(models), stream(tmp_path, files=2)):
        dealt = [numbers(source.share(share(member), 0)) for member in (3, 4, 1 << 20)]
        assert all(sorted(own) == list(range(DOCUMENTS)) for own in dealt)
        assert dealt[0] != dealt[1] != dealt[2]


def test_held_out_documents_are_never_trained_on(models: Path, tmp_path: Path) -> None:
    for source in (table(models), stream(tmp_path, files=2)):
        held_out = list(held_out_texts(source))
        trained = set(itertools.islice(training_texts(source, share(0, 1)), 2 * DOCUMENTS))
        assert trained.isdisjoint(held_out)
        assert len(trained) + len(held_out) == DOCUMENTS
        assert 4 <= len(held_out) <= 20


def test_training_lowers_the_held_out_loss(models: Path) -> None:
    made = workload(models, init="random", batch=8)
    torch.manual_seed(0)
    model = made.build()
    assert model.training
    with torch.no_grad():
        before = made.evaluate(model.eval())
        assert made.evaluate(model) == before
    assert before == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    for batch in itertools.islice(made.batches(share(0, 1)), 40):
        loss, tokens = made.loss(model, batch)
        assert tokens == 8 * (LENGTH - 1)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert made.evaluate(model.eval()) < before - 1.5


def test_loss_is_that_of_the_next_token(models: Path) -> None:
    made = workload(models, model="llama")
    model = made.build()
    batch = next(made.batches(share(0)))
    logits = model(input_ids=batch).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 64), batch[:, 1:].reshape(-1))
    assert made.loss(model, batch)[0].item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["own/gpt2", "llama"])
@torch.no_grad()
def test_continuations_are_drawn_from_what_the_model_predicts_until_the_text_ends(models: Path, name: str) -> None:
    made = workload(models, model=name)
    model, tokenizer = made.build().eval(), load_tokenizer(models / "models" / name)
    prompts = [sentence(1), *made.prompts]
    rows = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    begun, generator = [len(row) for row in rows], sample_generator()
    speaking = list(rows)
    while speaking:
        for row in tuple(speaking):
            logits = model(input_ids=torch.tensor([row])).logits[:, -1]
            row.append(int(draw_tokens(logits, generator)))
            if row[-1] == tokenizer.eos_token_id or len(row) == LENGTH:
                speaking = [other for other in speaking if other is not row]
    *_, texts = made.continuations(model, prompts)
    expected = [tokenizer.decode(row[start:], skip_special_tokens=True) for row, start in zip(rows, begun, strict=True)]
    assert texts == expected
    assert all(texts)


@pytest.mark.parametrize("name", ["own/gpt2", "llama"])
def test_bf16_and_checkpointing_keep_float32_parameters(models: Path, name: str) -> None:
    plain = workload(models, model=name)
    batch = next(plain.batches(share(0)))
    losses: list[float] = []
    gradients: list[list[torch.Tensor]] = []
    for options in ({}, {"gradient_checkpointing": True}, {"bf16": True, "gradient_checkpointing": True}):
        made = workload(models, model=name, **options)
        model = made.build()
        recomputing = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
        assert bool(recomputing) is made.gradient_checkpointing
        assert model.training
        torch.manual_seed(3)  # dropout
        loss, _ = made.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        assert {value.dtype for value in (*model.parameters(), *gradients[-1])} == {torch.float32}
    assert losses[1] == losses[0]
    assert len(gradients[0]) > 10
    assert all(torch.equal(one, other) for one, other in zip(gradients[0], gradients[1], strict=True))
    assert losses[2] != losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=0.02)
    torch.testing.assert_close(gradients[2][0], gradients[0][0], rtol=0.1, atol=0.01)


@pytest.mark.long
@compiling
def test_compiled_training_is_the_plain_one(models: Path) -> None:
    """Of a model without dropout, whose random numbers the compiler draws in another order."""
    made = []
    for compiled in (False, True):
        kind = workload(models, model="llama", compile=compiled, bf16=False)
        model = kind.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for batch in itertools.islice(kind.batches(share(0)), 4):
            optimizer.zero_grad()
            loss, _ = kind.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            made.append((losses, kind.evaluate(model)))
    (plain, value), (other, other_value) = made
    assert plain[-1] < plain[0] - 0.1
    assert other == pytest.approx(plain, rel=1e-4)
    assert other_value == pytest.approx(value, rel=1e-4)


@compiling
def test_compiling_leaves_the_layout_alone(models: Path) -> None:
    plain, compiled = (FlatParameters(workload(models, compile=choice).build()) for choice in (False, True))
    assert plain.layout == compiled.layout
    assert workload(models, compile=True).build()._compiled_call_impl is not None


def test_tied_parameters_are_there_once(models: Path) -> None:
    model: Any = workload(models).build()
    assert model.lm_head.weight is model.transformer.wte.weight
    layout = FlatParameters(model).layout
    assert [name for name in layout.names if "wte" in name or "lm_head" in name] == ["transformer.wte.weight"]
    untied = FlatParameters(workload(models, model="llama").build()).layout
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(untied.names)


def test_initial_parameters_are_the_files_or_follow_the_seed(models: Path) -> None:
    from safetensors.torch import load_file

    def parameters(seed: int, init: str) -> torch.Tensor:
        torch.manual_seed(seed)
        return workload(models, init=init).build().get_parameter("transformer.wte.weight")

    saved = load_file(models / "models" / "own" / "gpt2" / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(parameters(1, "pretrained"), saved)
    assert torch.equal(parameters(1, "random"), parameters(1, "random"))
    assert not torch.equal(parameters(1, "random"), parameters(2, "random"))


def test_weights_in_another_precision_become_float32(models: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    small = AutoModelForCausalLM.from_pretrained(models / "models" / "llama", dtype=torch.bfloat16)
    small.save_pretrained(tmp_path / "models" / "llama")
    save_tokenizer(tmp_path / "models" / "llama")
    for init in ("pretrained", "random"):
        model = workload(tmp_path, model="llama", init=init).build()
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@compiling
@torch.no_grad()
@pytest.mark.parametrize("name", ["own/gpt2", "llama"])
def test_export_is_loaded_by_the_library_with_equal_logits(models: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = workload(models, model=name, compile=True, gradient_checkpointing=True, init="random")
    torch.manual_seed(9)
    model = made.build().eval()
    (tmp_path / "model.safetensors").write_bytes(b"of the export")
    made.export(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"of the export"
    files = {path.name for path in (tmp_path / "huggingface").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert not {path for path in files if path.endswith((".bin", ".pt", ".pkl"))}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface").eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "huggingface")(sentence(3), return_tensors="pt")["input_ids"]
    assert torch.equal(loaded(input_ids=tokens).logits, model.forward(input_ids=tokens).logits)


def complaint(data: Path, **options: Any) -> str:
    """The one line with which a workload is refused, when it is made or used."""

    def use() -> None:
        made = workload(data, **options)
        made.build()
        next(made.batches(share(0)))

    with pytest.raises(ConfigError) as caught:
        use()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("missing", ["transformers", "datasets"])
def test_missing_extra_is_named(models: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert complaint(models) == "the workload 'causal-lm' needs its extra: pip install 'shoal[hf]'"


def test_unknown_model_says_where_to_put_it(models: Path) -> None:
    text = complaint(models, model="nobody/nothing")
    assert "model 'nobody/nothing' is not here" in text
    assert "models/nobody/nothing in the folder that --data gives" in text


@pytest.mark.parametrize("name", ["/etc/model", "../model", "~/model", "a/../b", "a/b/c", "", "hf://x/y"])
def test_manifest_cannot_name_a_path(models: Path, name: str) -> None:
    assert "is no name of the Hugging Face Hub" in complaint(models, model=name)
    if name:
        assert "is no name of the Hugging Face Hub" in complaint(models, dataset=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_length": 1}, "sequence_length is 1, expected a whole number from 2"),
        ({"sequence_length": 65}, "sequence_length 65 is over the 64 that the model takes"),
        ({"batch": 0}, "batch is 0"),
        ({"init": "zero"}, "expected one of: pretrained, random"),
        ({"dataset": "wikitext"}, "lacks its owner"),
        ({"text_column": "body"}, "has no column 'body'; set text_column to one of: id, text"),
        ({"text_column": "id"}, "column 'id' holds int, not text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unfit_options_are_explained(models: Path, options: dict[str, Any], words: str) -> None:
    assert words in complaint(models, **options)


def test_weights_are_not_unpickled(models: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "models" / "llama"
    model = AutoModelForCausalLM.from_pretrained(models / "models" / "llama")
    model.config.save_pretrained(folder)
    save_tokenizer(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert "no file named model.safetensors" in complaint(tmp_path, model="llama")


def test_code_beside_a_model_is_not_run(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "odd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.Odd"}})
    )
    (folder / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Odd: ...\n")
    assert "cannot be loaded" in complaint(tmp_path, model="odd")
    assert not (tmp_path / "ran").exists()


def test_incomplete_weights_are_refused(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    source, folder = models / "models" / "llama", tmp_path / "models" / "llama"
    AutoConfig.from_pretrained(source).save_pretrained(folder)
    save_tokenizer(folder)
    weights = load_file(source / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "lack 1 parameters, model.norm.weight first" in complaint(tmp_path, model="llama")


def test_nothing_to_train_on_says_what_to_do(models: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(models / "models")
    assert "give --data a folder of .parquet, .jsonl, .txt files, or name a dataset" in complaint(tmp_path)
    hub = Hub(name="nobody/nothing", config="", revision="", split="train", streaming=True)
    with pytest.raises(ConfigError, match="dataset 'nobody/nothing' cannot be opened"):
        open_documents(data=str(tmp_path), hub=hub, column="text", sample_by="line")


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.parquet", b"nothing of the kind", "parquet"),
        ("a.jsonl", b'{"text": "whole"}\n{"text": 3\n', "json"),
        ("a.txt", b"\xff\xfe no UTF-8 \xff", "text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, kind: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} cannot be read as {kind}: .*; mend or remove it"):
        open_documents(data=str(tmp_path), hub=None, column="text", sample_by="line")


def test_files_are_found_by_kind_and_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl.gz", "notes.txt", ".hidden/x.jsonl", "models/m/tokenizer.json", "image.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in local_files(tmp_path)] == ["a/z.jsonl.gz", "b.jsonl"]
    assert local_files(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]
    (tmp_path / "c.parquet").touch()
    with pytest.raises(ConfigError, match="holds Parquet and JSON"):
        local_files(tmp_path)
    with pytest.raises(ConfigError, match="there is no file or folder"):
        local_files(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [("line", ["one", "two", "three"]), ("paragraph", ["one\ntwo", "three"]), ("document", ["one\ntwo\n\nthree"])],
)
def test_plain_text_is_cut_as_told(tmp_path: Path, sample_by: str, expected: list[str]) -> None:
    (tmp_path / "book").write_text("one\ntwo\n\nthree")
    texts = list(table(tmp_path / "book", sample_by=sample_by).everything())
    assert [text for text in texts if text] == expected


def test_too_few_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("one\n\ntwo")
    with pytest.raises(ConfigError, match="2 documents for 3 members"):
        next(training_texts(table(tmp_path), share(0)))
