"""docs/coverage.md says what the code does, for every Mixture-of-Experts architecture of transformers."""

import os

import pytest
import transformers

from tests.ecosystem import table
from tests.ecosystem.architectures import moe_types, tiny
from tests.ecosystem.assess import assess
from tests.ecosystem.expected import MUST_WORK, REFUSED, WHOLE_WRITES

A_DAY = 4
LARGEST = 3_000_000
"""Most parameters of a tiny model; most have a tenth of this."""

WRITTEN_WITH, PAGE = table.read()
TYPES = moe_types()
SAME_VERSION = transformers.__version__ == WRITTEN_WITH
needs_same_version = pytest.mark.skipif(
    not SAME_VERSION,
    reason=f"docs/coverage.md is about transformers {WRITTEN_WITH}, and {transformers.__version__} is installed",
)


def todays_types() -> list[str]:
    """Four types, other ones each day, so that all come up within a month; `COVERAGE_DAY` chooses another day."""
    start = int(os.environ["COVERAGE_DAY"]) * A_DAY
    return sorted({TYPES[(start + i) % len(TYPES)] for i in range(A_DAY)})


def as_the_page_says(model_type: str) -> None:
    """Types that an older or newer transformers lacks are not on its list; those it has must do the same."""
    found = table.as_read(assess(model_type))
    assert found == PAGE[model_type], f"run python -m tests.ecosystem {model_type}"


@needs_same_version
@pytest.mark.parametrize("model_type", todays_types())
def test_todays_architectures_do_what_the_page_says(model_type):
    as_the_page_says(model_type)


@needs_same_version
@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in TYPES if t not in todays_types()])
def test_every_architecture_does_what_the_page_says(model_type):
    as_the_page_says(model_type)


@needs_same_version
def test_every_architecture_is_on_the_page():
    assert set(PAGE) == set(TYPES)


def test_the_summary_counts_the_rows():
    rows = list(PAGE.values())
    assert table.summary(rows) in table.FILE.read_text()
    assert {row.state for row in rows} <= {"exact", "whole writes", "refused"}, "no architecture may be wrong"


def test_what_must_work_works():
    assert not set(MUST_WORK) - set(PAGE)
    assert not {t: PAGE[t].refused for t in MUST_WORK if PAGE[t].refused}


def test_each_refusal_is_the_right_one():
    """Why an architecture is refused was read from its source, apart from what fxskip says."""
    refused = {t: row.refused for t, row in PAGE.items() if row.state == "refused"}
    assert refused.keys() == REFUSED.keys()
    assert not {t: message for t, message in refused.items() if not REFUSED[t].fits(message)}


def test_what_only_whole_writes_can_be_left_out_of_is_known():
    whole = {t: row.farskip for t, row in PAGE.items() if row.state == "whole writes"}
    assert whole.keys() == WHOLE_WRITES.keys()
    assert not {t: message for t, message in whole.items() if not WHOLE_WRITES[t].fits(message)}


def test_tiny_models_are_tiny_and_have_experts():
    large, without = [], []
    for model_type in TYPES:
        model = tiny(model_type)
        if model.num_parameters() > LARGEST:
            large.append(model_type)
        if not any("expert" in name or "router" in name for name, _ in model.named_modules()):
            without.append(model_type)
    assert (large, without) == ([], [])
