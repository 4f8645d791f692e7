"""Small random Hugging Face models, and the comparisons that their tests share."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from flamia.integrations.transformers import register

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "attention_dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config(kind: str, **changes) -> PretrainedConfig:
    """`kind`: a family, or "sliding" (Mistral, a window of 20) and "mixed" (Qwen2, of which every second layer has one)."""
    options = {**SIZES, **changes}
    if kind == "llama":
        return LlamaConfig(**options)
    if kind == "qwen2":
        return Qwen2Config(**options)
    if kind == "qwen3":
        return Qwen3Config(**{"head_dim": 24, **options})
    if kind == "sliding":
        return MistralConfig(**{"sliding_window": 20, **options})
    if kind == "mixed":
        layers = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
        return Qwen2Config(**{**layers, **options})
    if kind == "gemma2":
        return Gemma2Config(**{"head_dim": 16, **options})
    raise ValueError(kind)


def model(kind: str, name: str, dtype=torch.bfloat16, **changes):
    """The same random weights for the same `kind`, whatever the attention."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config(kind, **changes), attn_implementation=name)
    return made.to(dtype)


def registered(recipe: str | None, **options) -> str:
    name = f"flamia {recipe} {sorted(options.items())}".replace("/", " ").replace(":", " ")
    return register(recipe, name, **options)


def tokens(batch: int, length: int, seed: int = 0):
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def error(x, exact) -> float:
    """Relative L2 error."""
    x, exact = x.double(), exact.double()
    return float((x - exact).norm() / exact.norm())


def positions(*lengths: int):
    return torch.cat([torch.arange(n) for n in lengths])[None]
