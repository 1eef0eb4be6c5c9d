"""Small random models with a tokenizer, made here: no hub, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1000
# Wider weights than a trained model's: it says something else in every conversation.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_llama(folder: Path, **config: Any) -> Path:
    """A model whose queries share keys and values in groups (GQA); `config` is as transformers has it."""
    return _make(folder, "Llama", "LlamaConfig", 0, **config)


def make_eagle(folder: Path) -> Path:
    """A draft model for `make_llama`'s: one layer, which sees the hidden states of the model that it drafts for."""
    import torch
    from safetensors.torch import load_file, save_file

    file = make_llama(folder, num_hidden_layers=1) / "model.safetensors"
    of_layer = {
        name.removeprefix("model."): weight
        for name, weight in load_file(file).items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    hidden, dice = COMMON["hidden_size"], torch.Generator().manual_seed(4)
    save_file({**of_layer, "fc.weight": 0.2 * torch.randn((hidden, 2 * hidden), generator=dice)}, file)
    return folder


def make_mtp(folder: Path) -> Path:
    """A model with a layer that predicts further tokens (MTP). It has no weights: `load_format` must be `dummy`."""
    import json

    import transformers

    of_experts: dict[str, Any] = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}
    config = transformers.Ernie4_5_MoeConfig(**COMMON, **of_experts, head_dim=32, moe_layer_start_index=3)
    more = {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_nextn_predict_layers": 1}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | more))
    _make_tokenizer(folder)
    return folder


def make_gemma(folder: Path) -> Path:
    """A model with two kinds of layers: full attention and a sliding window."""
    return _make(
        folder,
        "Gemma3",
        "Gemma3TextConfig",
        1,
        head_dim=32,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def make_deepseek(folder: Path) -> Path:
    """A model whose layers cache one latent for all heads (MLA), of the size that vLLM's CPU kernel knows."""
    return _make(
        folder,
        "DeepseekV2",
        "DeepseekV2Config",
        2,
        num_hidden_layers=2,
        num_attention_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=2,
    )


def make_mistral(folder: Path) -> Path:
    """A model whose layers all have a sliding window."""
    return _make(
        folder,
        "Mistral",
        "MistralConfig",
        3,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=128,
    )


def make_adapter(folder: Path, seed: int) -> Path:
    """An adapter of `make_llama`'s model that changes its answers and its KV; its weights depend on the seed."""
    import json

    import torch
    from safetensors.torch import save_file

    dice, rank, hidden = torch.Generator().manual_seed(seed), 8, COMMON["hidden_size"]
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight": 0.3
        * torch.randn(shape, generator=dice)
        for layer in range(COMMON["num_hidden_layers"])
        for name, width in (("q_proj", hidden), ("v_proj", hidden // 2))
        for part, shape in (("A", (rank, hidden)), ("B", (width, rank)))
    }
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**about, "target_modules": ["q_proj", "v_proj"]}))
    return folder


def _make(folder: Path, name: str, config_name: str, seed: int, **config: Any) -> Path:
    import torch
    import transformers

    torch.manual_seed(seed)
    made = getattr(transformers, config_name)(**COMMON | config)
    getattr(transformers, f"{name}ForCausalLM")(made).save_pretrained(folder)
    _make_tokenizer(folder)
    return folder


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="w1", eos_token="w2", pad_token="w0"
    ).save_pretrained(folder)
