# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes a tiny random Llama with a real tokenizer and chat template, offline.

usage: tiny_model.py OUT_DIR [VOCABULARY]

Seeded, so every run serves the same model. It talks nonsense, but which nonsense
depends on every token of the prompt: a KV block that did not arrive, or the wrong
one, changes the answer.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
# Tokens; of more, real models have long ones.
VOCABULARY = 512
HIDDEN = 64
HEADS = 2
LAYERS = 2
POSITIONS = 2048
# Wide enough for the greedy token to change with the prompt; transformers' default
# of 0.02 answers every prompt with the same token.
INITIALIZER_RANGE = 0.2

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ["<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]

# `tools` are rendered, so that they shape the prompt as they do in real models.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{{ tools | tojson }}{{ eos_token }}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(out: Path, vocabulary: int) -> None:
    """Trains a byte-level BPE on text that every Python brings: its own library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    library = Path(sysconfig.get_paths()["stdlib"])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, BOS, EOS, *ROLES],
        show_progress=False,
    )
    few = library / "argparse.py", library / "typing.py"
    texts = few if vocabulary == VOCABULARY else sorted(library.glob("*.py"))
    tokenizer.train([str(each) for each in texts], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=ROLES,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)


def save_weights(out: Path, vocabulary: int) -> None:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=INITIALIZER_RANGE,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(out)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    vocabulary = int(sys.argv[2]) if len(sys.argv) > 2 else VOCABULARY
    save_tokenizer(directory, vocabulary)
    save_weights(directory, vocabulary)
