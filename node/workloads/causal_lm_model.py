"""Models and tokenizers for the workload `causal-lm`: found by name, loaded without running code or unpickling.

A name is one of the Hugging Face Hub, with a revision after ``@`` if one is meant. A folder `models/NAME` below the
node's data comes before the Hub, so a model of one's own needs no Hub; a path in a manifest is refused, since a swarm
must not choose which files of yours are read. Weights are read from safetensors alone, and code that lies beside
a model is neither fetched nor run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.node.pipe import one_line
from shoal.node.workloads.causal_lm_data import MODELS
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

EXPORT_FOLDER = "huggingface"
"""Beside a model's tensors: the same in the layout of Hugging Face."""
NAME = re.compile(r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
DESCRIPTIONS = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configuration and tokenizer."""
WEIGHTS = ("*.safetensors",)
LEFT_OUT = ("*/*", "adapter_config.json")
"""Other formats in folders, and what would have another model's weights loaded."""


def split_name(name: str, *, option: str) -> tuple[str, str | None]:
    """Split ``owner/name@revision``. Raises `ConfigError` on a path or anything else that is no name."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"workload 'causal-lm': {option} {name!r} is no name of the Hugging Face Hub; it has the form owner/name "
            f"or owner/name@revision, and a local model is the folder {MODELS}/NAME in what --data gives"
        )
    return match["name"], match["revision"]


def find_model(name: str, *, data: str | None, weights: bool) -> Path:
    """Return the folder of a model: below `data`, in the Hub's cache, or downloaded. Raises `ConfigError`.

    weights: whether they are needed, or only configuration and tokenizer.
    """
    from huggingface_hub import snapshot_download

    repository, revision = split_name(name, option="model")
    if data is not None and (own := Path(data).expanduser() / MODELS / repository).is_dir():
        return own
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[*DESCRIPTIONS, *(WEIGHTS if weights else ())],
            ignore_patterns=list(LEFT_OUT),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {name!r} is not here, and cannot be fetched ({type(error).__name__}); check its name and the "
            f"connection, or put it into {MODELS}/{repository} in the folder that --data gives"
        ) from None
    return Path(folder)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer in `folder`. Raises `ConfigError` if there is none, or it has no end-of-text token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(
            f"there is no tokenizer that can be loaded in {folder}: {one_line(error)}; complete the folder"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no end-of-text token, which goes between documents; choose another"
        )
    return tokenizer


def load_model(folder: Path, *, pretrained: bool) -> nn.Module:
    """Make the model in `folder`, float32, with its weights or with random ones. Raises `ConfigError`."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    shared = {"dtype": torch.float32, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check_config(config, folder)
        if not pretrained:
            made: nn.Module = AutoModelForCausalLM.from_config(config, **shared)
            return made
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True, **shared
        )
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {one_line(error)}; complete the folder") from error
    lacking = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    if lacking:
        raise ConfigError(
            f"the weights in {folder} lack {len(lacking)} parameters, {lacking[0]} first; "
            'set init = "random", or use a model that is complete'
        )
    loaded: nn.Module = model
    return loaded


def _check_config(config: Any, folder: Path) -> None:
    """Refuse what would fetch code, or leave no float32 parameters to train."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"the model in {folder} is quantized; use the one that it was made from")
    if "/" in str(getattr(config, "_attn_implementation", None)):
        raise ConfigError(f"the configuration in {folder} asks for code of the Hub; remove attn_implementation there")
