"""A save that is killed leaves what was there, or what was to be there, and never anything else."""

import shutil
import sys

import pytest

from tests.checkpoint.samples import run_module, tree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL and the exchange of two folders")


@pytest.fixture(scope="module")
def killed(stock, saved, tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    old = root / "old"
    shutil.copytree(saved, old)
    (old / "notes").mkdir()
    (old / "notes" / "why.txt").write_text("kept")
    printed = run_module("tests.checkpoint.killed_saves", stock, old, root, cache=root / "cache")
    return root, int(printed.splitlines()[-1])


def test_the_folder_is_whole_after_a_kill_at_any_step(killed):
    root, kills = killed
    old = tree(root / "old")
    new = tree(root / "whole" / "out") | {"notes/why.txt": b"kept"}
    assert old["config.json"] != new["config.json"]
    found = [tree(root / str(number) / "out") for number in range(1, kills + 1)]
    assert all(each in (old, new) for each in found)
    # Once it is new it stays new, and there are kills on both sides of that step.
    turned = [each == new for each in found]
    assert turned == sorted(turned) and len(set(turned)) == 2


def test_the_next_save_works_and_clears_up(killed):
    root, kills = killed
    new = tree(root / "whole" / "out") | {"notes/why.txt": b"kept"}
    assert kills > 20
    assert any(
        len(list((root / str(number)).iterdir())) > 1 for number in range(1, kills + 1)
    )  # left by a kill
    for number in range(1, kills + 1):
        folder = root / f"again_{number}"
        assert [path.name for path in folder.iterdir()] == ["out"]
        assert tree(folder / "out") == new
