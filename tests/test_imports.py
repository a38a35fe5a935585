"""A file imports from files above its own, in the order of the table in ARCHITECTURE.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_THE_PACKAGE = {"", "__main__", "version"}
"""What gathers the public names or starts the command, and a number: in no row, and imported by anybody."""


def rows() -> dict[str, int]:
    """The row of each file or folder of the package."""
    found = {}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for number, names in enumerate(re.findall(r"^\| (`.+?) \|", text, flags=re.MULTILINE)):
        found |= {name.rstrip("/").removesuffix(".py"): number for name in re.findall(r"`(.+?)`", names)}
    return found


def imports() -> Iterator[tuple[str, str, Path]]:
    """Who imports whom, by file or folder; imports for types alone, too."""
    for path in sorted((ROOT / "fxskip").rglob("*.py")):
        who = path.relative_to(ROOT / "fxskip").with_suffix("").parts[0].removesuffix("__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    package, _, rest = f"{before}{alias.name}".partition(".")
                    if package == "fxskip":
                        yield who, rest.partition(".")[0], path


def has_code(part: Path) -> bool:
    return part.suffix == ".py" or any(part.glob("*.py"))


def test_a_file_imports_from_files_above_its_own():
    row, found = rows(), [one for one in imports() if not set(one[:2]) & OF_THE_PACKAGE]
    parts = {part.stem.removeprefix("__init__") for part in (ROOT / "fxskip").glob("[!.]*") if has_code(part)}
    assert row.keys() == parts - OF_THE_PACKAGE
    wrong = [f"{path.relative_to(ROOT)} imports {whom}" for who, whom, path in found if row[who] < row[whom]]
    assert wrong == [] and len(found) > 500
