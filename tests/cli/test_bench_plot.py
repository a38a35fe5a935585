"""fxskip bench plot: what it draws of which reports."""

import json

import matplotlib
import pytest

from tests.cli.command import run

ROWS = [
    {"variant": "sparse_kl", "tokens": 4096, "median_ms": 11.0, "peak_gib": 1.5},
    {"variant": "sparse_kl", "tokens": 8192, "median_ms": 21.0, "peak_gib": 2.0},
    {"variant": "dense_sparse_kl", "tokens": 4096, "median_ms": 15.0, "peak_gib": 4.0},
    {"variant": "dense_sparse_kl", "tokens": 8192, "unavailable": "OutOfMemoryError"},
]
REPORT = {"vocabulary": 131072, "ranks": 2, "gpu": "H200", "width": 2048, "dtype": "bfloat16", "rows": ROWS}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws reports; gives the exit status and the figure's words."""
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text, not its outlines

    def draw(*reports):
        paths = [tmp_path / f"{number}.json" for number in range(len(reports))]
        for path, report in zip(paths, reports, strict=True):
            path.write_text(json.dumps(report))
        figure = tmp_path / "figure.svg"
        figure.unlink(missing_ok=True)
        status = run("bench", "plot", *paths, "--out", figure)
        return status, figure.read_text() if figure.exists() else None

    return draw


def test_one_report(drawn):
    status, figure = drawn(REPORT)
    assert status == 0
    assert "V=131072 over 2 x H200, d=2048, bfloat16<" in figure
    assert "dense_sparse_kl" in figure


def test_a_tiny_report_of_a_cpu(drawn):
    rows = [row | {"peak_gib": None} for row in ROWS[:2]]
    tiny = {key: REPORT[key] for key in ("vocabulary", "ranks")} | {"tiny": True, "rows": rows}
    status, figure = drawn(tiny)
    assert status == 0
    # What the report does not say, the title does not either.
    assert "V=131072 over 2 x CPU, tiny: times mean nothing<" in figure


def test_two_reports(drawn, capsys):
    parts = [REPORT | {"rows": ROWS[number::2]} for number in range(2)]
    assert drawn(*parts)[0] == 0
    assert drawn(*parts, REPORT | {"gpu": "A100"}) == (2, None)
    assert "not of one machine" in capsys.readouterr().err


def test_reports_without_anything_to_draw(drawn, capsys):
    assert drawn({}) == (2, None)
    assert "has no rows over tokens" in capsys.readouterr().err
    assert drawn(REPORT | {"rows": ROWS[3:]}) == (2, None)
    assert "none of its 1 rows has a measurement" in capsys.readouterr().err
