"""A policy over small models of `transformers` that are made here. Skipped without the extra `shoal[hf]`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.node.sapo.causal_lm_policy import CausalLMPolicy, CausalLMSettings
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings
from shoal.node.sapo.updates import UpdateSettings
from shoal.protocol.errors import ConfigError
from tests.node.sapo.draws import assigned
from tests.node.sapo.policy_contract import assert_draws_and_scores_as
from tests.node.sapo.sums import score, sum_task

pytestmark = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("peft")), reason="the extra shoal[hf] is not installed"
)
"""Not imported to find out, which takes seconds: every process that runs tests imports this module."""

LETTERS = "01234+="
END = "<end>"
VOCABULARY = len(LETTERS) + 2
PROMPTS = ("1+2=", "2+2+1=", "0=", "=")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    pytest.importorskip("transformers")  # which warns


def new_tokenizer(*, chat: bool = False, letters: str = LETTERS) -> Any:
    """A token for each of the letters."""
    import transformers
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    names = ["?", END, *letters]
    inner = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token="?"))
    inner.pre_tokenizer = Split(Regex("."), "isolated")
    inner.decoder = Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token=END)
    if chat:
        tokenizer.chat_template = "{% for turn in messages %}0{{ turn.content }}{% endfor %}=="
    return tokenizer


def new_model(kind: str = "llama", *, vocabulary: int = VOCABULARY) -> torch.nn.Module:
    """Weights large enough that what is drawn depends on every token before."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if kind == "llama":
            config = transformers.LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=32,
                initializer_range=0.4,
            )
            made: torch.nn.Module = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.GPT2Config(
                vocab_size=vocabulary, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4
            )
            made = transformers.GPT2LMHeadModel(config)
    return made


def new_policy(kind: str = "llama", *, chat: bool = False, **settings: Any) -> CausalLMPolicy:
    limits = CausalLMSettings(**({"prompt_tokens": 12, "completion_tokens": 8} | settings))
    return CausalLMPolicy(new_model(kind), new_tokenizer(chat=chat), limits)


@torch.no_grad()
def whole_forward(policy: CausalLMPolicy, prompt: tuple[int, ...], completion: list[int]) -> torch.Tensor:
    """Log-probabilities of a completion's tokens: one sequence alone, without padding and cache."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logs = torch.log_softmax(logits / policy.settings.temperature, dim=1)
    return logs.gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generation_and_log_probs_equal_a_forward_of_each_alone(kind: str, temperature: float) -> None:
    policy = new_policy(kind, temperature=temperature)
    assert_draws_and_scores_as(partial(whole_forward, policy), policy, PROMPTS, end=1, limit=8, copies=4)


def test_text_is_encoded_with_an_end_and_without_special_tokens() -> None:
    policy = new_policy()
    assert policy.encode_completion("12") == (3, 4, 1)
    assert policy.encode_completion("") == (1,)
    assert policy.encode_completion("0" * 20) == (2,) * 8
    assert policy.encode_completion("1x") is None
    assert policy.encode_completion(f"1{END}2") is None
    assert policy.decode((3, 4, 1)) == "12"
    assert policy.encode_prompt("0" * 20 + "1") == (2,) * 11 + (3,)
    assert policy.encode_prompt("") == (1,)


def test_prompts_follow_the_chat_template() -> None:
    policy = new_policy(chat=True)
    assert policy.encode_prompt("1+") == new_policy().encode_prompt("01+==")


def test_adapters_alone_are_trained() -> None:
    policy = new_policy(lora_rank=2)
    base = [parameter.detach().clone() for parameter in policy.model.parameters() if not parameter.requires_grad]
    assert sum(parameter.numel() for parameter in policy.parameters()) < sum(parameter.numel() for parameter in base)
    adapters = [parameter.detach().clone() for parameter in policy.parameters()]
    learner = Learner(
        policy,
        LearnerSettings(local=4, group_size=4, updates=UpdateSettings(learning_rate=1e-2)),
        draw=lambda round, index: sum_task(round, index, most=2),
        score=lambda pairs: [float(at % 2) for at in range(len(pairs))],
        sharing=Alone(),
        draws=assigned(1),
    )
    for _ in range(2):
        learner.run_round()
    after = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
    assert all(torch.equal(one, other) for one, other in zip(base, after, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(adapters, policy.parameters(), strict=True))


def test_a_model_of_transformers_learns() -> None:
    policy = CausalLMPolicy(
        new_model(), new_tokenizer(), CausalLMSettings(prompt_tokens=8, completion_tokens=3, bf16=False)
    )
    learner = Learner(
        policy,
        LearnerSettings(updates=UpdateSettings(learning_rate=5e-3)),
        draw=lambda round, index: sum_task(round, index, most=2),
        score=score,
        sharing=Alone(),
        draws=assigned(1),
    )
    rewards = [learner.run_round().reward for _ in range(40)]
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-5:]) / 5 > 0.2


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="reads 32 tokens"):
        new_policy(prompt_tokens=30, completion_tokens=30)
    with pytest.raises(ConfigError):
        CausalLMSettings(temperature=0.0)
    tokenizer = new_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="end-of-text"):
        CausalLMPolicy(new_model(), tokenizer, CausalLMSettings(prompt_tokens=8, completion_tokens=8))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_exported_policy_is_a_model_of_hugging_face(tmp_path: Path, lora_rank: int) -> None:
    import transformers

    policy = new_policy(lora_rank=lora_rank)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    prompt = policy.encode_prompt(PROMPTS[0])
    expected = whole_forward(policy, prompt, [2, 3, 1])
    policy.export(tmp_path)
    folder = tmp_path / "huggingface"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    again = CausalLMPolicy(model, tokenizer, CausalLMSettings(prompt_tokens=12, completion_tokens=8))
    assert torch.allclose(whole_forward(again, again.encode_prompt(PROMPTS[0]), [2, 3, 1]), expected, atol=1e-5)


CHAT = (
    "{% for turn in messages %}{{ '1' if turn.role == 'user' else '2' }}{{ turn.content }}END=+{% endfor %}"
    "{% if add_generation_prompt %}2{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "between"),
    [
        pytest.param(None, "\n5\n", id="no template"),
        pytest.param(CHAT.replace("END", END), f"=+15{END}=+2", id="its turns end with the end token"),
        pytest.param(CHAT.replace("END", ""), "=+15=+2", id="its turns end otherwise"),
        pytest.param("{{ '1' + messages[-1].content + '+2' }}", "15+2", id="it has the last turn alone"),
    ],
)
def test_dialogue_goes_on_as_the_chat_template_has_it(template: str | None, between: str) -> None:
    policy = new_policy(prompt_tokens=16, completion_tokens=16)
    tokenizer = policy._tokenizer
    tokenizer.chat_template = template
    assert policy.encode_reply("5") == tuple(tokenizer(between, add_special_tokens=False)["input_ids"])
    said = policy.encode_completion("4")
    assert said is not None
    if template is not None and END in template:
        turns = [("user", "3"), ("assistant", "4"), ("user", "5")]
        chat = [{"role": role, "content": content} for role, content in turns]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tuple(tokenizer(whole, add_special_tokens=False)["input_ids"])
        assert policy.encode_prompt("3") + said + policy.encode_reply("5") == ids, "as a chat of so many turns"
