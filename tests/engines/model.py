"""Small random models with a tokenizer, made here: no hub, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 1000


def make_llama(folder: Path, *, layers: int = 4, hidden: int = 256, kv_heads: int = 4, seed: int = 0) -> Path:
    """A Llama that says something else in every conversation: its weights are wider than a trained one's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
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


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="w1", eos_token="w2", pad_token="w0"
    ).save_pretrained(folder)
