"""Every row of the tables in docs/training.md names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows() -> list[str]:
    lines = (ROOT / "docs" / "training.md").read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| what |")]


def names_of_tests(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_row_names_an_existing_test() -> None:
    assert len(rows()) > 30
    for row in rows():
        named = re.search(r"`(\S+\.py)::(test_\w+)` \|$", row)
        assert named, f"no test at the end of: {row}"
        file, test = named.groups()
        assert test in names_of_tests(ROOT / "tests" / file), f"{file} has no {test}"


def test_each_module_of_this_folder_is_named() -> None:
    text = "\n".join(rows())
    for file in Path(__file__).parent.glob("test_*.py"):
        assert file.name in text or file.name == "test_docs.py"
