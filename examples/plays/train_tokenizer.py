"""Train the tokenizer of the bundled model: byte-level BPE over the training split.

    python examples/plays/train_tokenizer.py

Training is deterministic: a second run writes the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from corpus import load_split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MODEL_DIR = Path(__file__).resolve().parent / "model"

# One token ends a document and begins the next. A begin token of its own would be an untrained embedding
# at the first position of every prompt, because training windows start in the middle of a document.
BOUNDARY = "<|end|>"
PAD = "<|pad|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab_size` tokens: any text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"train_tokenizer: the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}; "
            "ask for fewer, or give more text"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOUNDARY,
        eos_token=BOUNDARY,
        pad_token=PAD,
        model_max_length=512,
        padding_side="left",  # batches are padded for generation only
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=4096)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer((document.text for document in load_split("train")), arguments.vocab_size)
    tokenizer.save_pretrained(arguments.out)
    print(f"{len(tokenizer)} tokens written to {arguments.out}")


if __name__ == "__main__":
    main()
