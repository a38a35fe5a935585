"""Hardware files: strict, each figure with its source, errors with lines."""

import pytest

from fxskip.errors import SpecError
from fxskip.schedule.hardware import BYTES, Figure, Hardware, hardware_names, load_hardware
from fxskip.spec import preset_names, specs_folder
from fxskip.strict_model import Strict

FILES = specs_folder() / "hardware"


def figures(part: object) -> list[Figure]:
    if isinstance(part, Figure):
        return [part]
    if isinstance(part, Strict):
        return [f for name in type(part).model_fields for f in figures(getattr(part, name))]
    return [f for value in part.values() for f in figures(value)] if isinstance(part, dict) else []


def test_the_files_are_known_by_name_and_are_no_presets():
    assert hardware_names() == ("b200", "h200", "mi300x")
    assert not set(hardware_names()) & set(preset_names())


@pytest.mark.parametrize("name", ["b200", "h200", "mi300x"])
def test_a_file_that_comes_with_fxskip(name):
    made = load_hardware(name)
    assert made == load_hardware(FILES / f"{name}.yaml") == load_hardware(made)
    assert made.matrix_flop_per_s.keys() == BYTES.keys()
    assert made.domain.gpus == 8
    transports = (
        ("nccl", "nccl_network", "copy_engine") if name == "h200" else ()
    )  # measured on that one alone
    assert tuple(made.contention) == transports
    assert len(figures(made)) == 2 * (len(BYTES) + 3) + 2 + 6 * len(transports)
    assert all(figure.source.strip() for figure in figures(made))


@pytest.mark.parametrize(
    ("name", "bf16_dense_tflops", "hbm_tb_per_s", "link_gb_per_s"),
    # As the vendors print them: NVIDIA's FLOPs with sparsity (twice the dense), links in both directions.
    [
        ("h200", 1979 / 2, 4.8, 900 / 2),
        ("b200", 36000 / 8 / 2, 64 / 8, 1800 / 2),
        ("mi300x", 1307.4, 5.3, 7 * 64),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, bf16_dense_tflops, hbm_tb_per_s, link_gb_per_s):
    made = load_hardware(name)
    assert made.matrix_flop_per_s["bfloat16"].peak.value == pytest.approx(bf16_dense_tflops * 1e12)
    assert made.hbm_bytes_per_s.peak.value == pytest.approx(hbm_tb_per_s * 1e12)
    assert made.domain.link_bytes_per_s.peak.value == pytest.approx(link_gb_per_s * 1e9)


def test_in_a_mesh_a_small_group_leaves_links_idle():
    mesh, switch = load_hardware("mi300x").domain, load_hardware("h200").domain
    assert mesh.bytes_per_s(8) == mesh.link_bytes_per_s.per_s == pytest.approx(7 * 48e9)
    assert mesh.bytes_per_s(2) == pytest.approx(48e9)
    assert switch.bytes_per_s(2) == switch.bytes_per_s(8) == switch.link_bytes_per_s.per_s


def changed(tmp_path, *edits):
    text = (FILES / "h200.yaml").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def line_of(path, words):
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if words in line)


def test_all_problems_are_told_with_their_lines(tmp_path):
    path = changed(
        tmp_path,
        ("hbm_bytes_per_s:", "hbm_byte_per_s:"),
        ("topology: switch", "topology: ring"),
        ("value: 0.86", "value: 86"),
        ("2.1e-6", "-1"),
    )
    with pytest.raises(SpecError) as caught:
        load_hardware(path)
    found = {problem.location: problem for problem in caught.value.problems}
    assert found["hbm_byte_per_s"].line == line_of(path, "hbm_byte_per_s")
    assert "did you mean 'hbm_bytes_per_s'?" in found["hbm_byte_per_s"].message
    assert found["hbm_bytes_per_s"].message == "missing"
    assert "expected switch or mesh" in found["domain.topology"].message
    assert found["network.link_bytes_per_s.achievable.value"].line == line_of(path, "value: 86")
    assert "must be 1.0 or less" in found["network.link_bytes_per_s.achievable.value"].message
    assert found["kernel_start_s.value"].line == line_of(path, "kernel_start_s")
    assert len(found) == 5


def test_a_type_that_does_not_exist(tmp_path):
    path = changed(tmp_path, ("  float8:", "  float7:"))
    with pytest.raises(SpecError, match="float7"):
        load_hardware(path)


@pytest.mark.parametrize("source", ["h20", 7, None])
def test_an_unknown_name_lists_the_known_ones(source):
    with pytest.raises(SpecError, match="b200, h200, mi300x"):
        load_hardware(source)


def test_a_figure_without_a_source(tmp_path):
    path = changed(tmp_path, (', source: "NVIDIA H200 data sheet: 4.8 TB/s"', ""))
    with pytest.raises(SpecError, match=r"hbm_bytes_per_s\.peak\.source +missing"):
        load_hardware(path)


def test_hardware_is_frozen():
    assert Hardware.model_config["frozen"]
