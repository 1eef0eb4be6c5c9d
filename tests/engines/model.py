"""Small random models with a tokenizer, made here: no hub, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1000


def make_llama(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 8,
    kv_heads: int = 4,
    tokens_max: int = 8192,
    seed: int = 0,
) -> Path:
    """A Llama that says something else in every conversation: its weights are wider than a trained one's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=tokens_max,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _make_tokenizer(folder)
    return folder


def make_gemma(folder: Path) -> Path:
    """A model with two kinds of layers: those that look at everything, and those that look through a window."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8192,
        initializer_range=0.2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    _make_tokenizer(folder)
    return folder


def make_deepseek(folder: Path) -> Path:
    """A model whose layers cache one latent for all heads (MLA), of the size that vLLM's CPU kernel knows."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(2)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        first_k_dense_replace=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    _make_tokenizer(folder)
    return folder


def make_mistral(folder: Path) -> Path:
    """A model all of whose layers look through a window."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=128,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    MistralForCausalLM(config).save_pretrained(folder)
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
