"""docs/coverage.md: written from rows, and read back to rows."""

import re
from collections.abc import Iterable
from pathlib import Path

import transformers

from tests.ecosystem.assess import Row
from tests.ecosystem.expected import REFUSED

FILE = Path(__file__).parents[2] / "docs" / "coverage.md"

_HEAD = """\
# Coverage

Every Mixture-of-Experts architecture of transformers {version}, found by program, each tried on a tiny random model in
fp32. `python -m tests.ecosystem` writes this page and `make test-all` checks it; `make test` checks four types a day.

{summary}

- **identity**: logits and all gradients against the original, bit by bit.
- **farskip**, **ladder**: logits against the original layers run with hooks (`tests/ecosystem/reference.py`), which
  knows nothing of fxskip. Exact is a difference below 1e-5 of the logits' standard deviation.
- **generate**: eight greedy tokens with a cache; identity against the original, farskip against no cache.
- **reload**: saved, and loaded by its Auto class, bit by bit.
- An empty cell is *exact*. Numbers before kinds of sub-block count them in the tiny model.

## Rewired

| model type | sub-blocks | identity | farskip | ladder | generate | reload |
|---|---|---|---|---|---|---|
"""
_REFUSED_HEAD = """
## Refused

`transform` raises an error for these. *Why* is read from the model's source, not from the error.

| model type | why | error |
|---|---|---|
"""
_CHECKS = ("identity", "farskip", "ladder", "generate", "reload")


def page(rows: Iterable[Row]) -> str:
    """The text of docs/coverage.md."""
    ordered = sorted(rows, key=lambda row: row.model_type)
    rewired = [row for row in ordered if not row.refused]
    refused = [row for row in ordered if row.refused]
    text = _HEAD.format(version=transformers.__version__, summary=summary(ordered))
    for row in rewired:
        cells = [_cell(getattr(row, check)) for check in _CHECKS]
        text += f"| `{row.model_type}` | {row.blocks} | {' | '.join(cells)} |\n"
    text += _REFUSED_HEAD
    for row in refused:
        why = REFUSED[row.model_type].why if row.model_type in REFUSED else "not known yet"
        text += f"| `{row.model_type}` | {why} | {_cell(row.refused)} |\n"
    return text


def summary(rows: list[Row]) -> str:
    """One line: how many of all are exact, exact but for addends, refused, and wrong."""
    counts = [
        sum(row.state == state for row in rows) for state in ("exact", "whole writes", "refused", "failed")
    ]
    return (
        f"**{counts[0]} exact, {counts[1]} exact with whole writes (`all@n`) only, {counts[2]} refused, "
        f"{counts[3]} failed, of {len(rows)}.**"
    )


def _cell(found: str) -> str:
    """A finding in one line; the finding `exact` is an empty cell."""
    return "" if found == "exact" else re.sub(r"\s+", " ", found).replace("|", "\\|").strip()


def read() -> tuple[str, dict[str, Row]]:
    """The version of transformers that the page was written with, and its rows."""
    text = FILE.read_text()
    version = re.search(r"of transformers (\S+),", text)
    assert version is not None, f"{FILE} names no version of transformers"
    rows: dict[str, Row] = {}
    rewired, _, refused = text.partition("## Refused")
    for cells in _table(rewired):
        checks = {check: cell or "exact" for check, cell in zip(_CHECKS, cells[2:], strict=True)}
        rows[cells[0]] = Row(cells[0], blocks=cells[1], **checks)
    for cells in _table(refused):
        rows[cells[0]] = Row(cells[0], refused=cells[2])
    return version.group(1), rows


def _table(text: str) -> Iterable[list[str]]:
    for line in text.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            yield [cells[0].strip("`"), *cells[1:]]


def as_read(row: Row) -> Row:
    """What `read` gives for a row that was written: comparable with what the page holds."""
    checks = {check: _cell(getattr(row, check)).replace("\\|", "|") or "exact" for check in _CHECKS}
    if row.refused:
        return Row(row.model_type, refused=_cell(row.refused).replace("\\|", "|"))
    return Row(row.model_type, blocks=row.blocks, **checks)
