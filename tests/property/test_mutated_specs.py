"""Changed specs: each is loaded for what it says, or refused with its line; nothing else happens.

One case again: pytest "tests/property/test_mutated_specs.py::test_a_changed_spec[misfit-3]"
"""

import gc
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fxskip.errors import SpecError
from fxskip.spec import Spec, load_spec, specs_folder
from tests.property.mutations import (
    FULL_SPEC,
    LIVE_TAGS,
    MUTATORS,
    SAME,
    SENTINEL,
    UNSURE,
    Mutant,
    Mutator,
)

BASES = [FULL_SPEC, *(path.read_text() for path in sorted(specs_folder().glob("*.yaml")))]
ROOT = Path(__file__).parents[2]
CPU_SECONDS = 1.0
MEMORY_MIB = 64

# --- nothing runs --------------------------------------------------------------------------------

_DEEDS = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
          "os.remove", "os.rename", "os.mkdir", "socket.connect", "urllib.Request", "ctypes.dlopen")  # fmt: skip
_seen: list[str] = []
_watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event in _DEEDS:
        _seen.append(f"{event}{arguments}")


sys.addaudithook(_watch)


@pytest.fixture
def deeds() -> Iterator[list[str]]:
    """What Python does beside computing while the test runs: processes, files written, connections."""
    global _watching
    _seen.clear()
    _watching = True
    yield _seen
    _watching = False


@pytest.mark.parametrize("tag", LIVE_TAGS)
def test_an_unsafe_reader_would_run_the_tags(tag: str, tmp_path: Path, deeds: list[str]) -> None:
    """So the cases below have something to fail on, and the watch sees it."""
    sentinel = tmp_path / "ran"
    yaml.unsafe_load(f"x: {tag.replace(SENTINEL, str(sentinel))}")
    assert sentinel.exists()
    assert deeds


# --- cases ---------------------------------------------------------------------------------------


def case(mutator: Mutator, seed: int) -> tuple[str, Mutant]:
    """The valid text and what became of it."""
    draw = random.Random(f"{mutator.__name__} {seed}")
    base = draw.choice(BASES)
    return base, mutator(base, draw)


def load(path: Path, content: bytes) -> Spec | SpecError:
    """The spec or its refusal. Any other exception fails the test, and so does a load that takes long."""
    path.write_bytes(content)
    gc.disable()  # or the load pays for sweeping up what the thousand tests before it left
    start = time.process_time()
    try:
        result: Spec | SpecError = load_spec(path)
    except SpecError as error:
        result = error
    finally:
        seconds = time.process_time() - start
        gc.enable()
    assert seconds < CPU_SECONDS
    return result


def check(base: str, mutant: Mutant, folder: Path, deeds: list[str]) -> None:
    path, sentinel = folder / "mutant.yaml", folder / "ran"
    content = mutant.content.replace(SENTINEL.encode(), str(sentinel).encode())
    original = load(folder / "base.yaml", base.encode())
    deeds.clear()
    found = load(path, content)
    assert [deed for deed in deeds if str(path) not in deed] == []
    assert not sentinel.exists()

    told = f"{mutant.what}\n{mutant.content[:2000].decode(errors='backslashreplace')}\n{found!s:.2000}"
    if mutant.line == SAME:
        assert found == original, told
    elif isinstance(found, Spec):
        assert mutant.line == UNSURE, f"accepted: {told}"
        assert meaning(found.to_dict()) == meaning(yaml.safe_load(content.decode("utf-8-sig"))), told
    else:
        assert_well_told(found, mutant, told)


def assert_well_told(error: SpecError, mutant: Mutant, told: str) -> None:
    """A refusal names lines that exist and the right one, and its text can be printed and read."""
    last = mutant.content.count(b"\n") + 1
    lines = [problem.line for problem in error.problems]
    if mutant.line == 0:
        assert lines == [None], told
    else:
        assert all(line is not None and 1 <= line <= last for line in lines), told
    if mutant.line > 0:
        assert mutant.line in lines, f"line {mutant.line} is at fault: {told}"
    message = str(error)
    assert len(message) < 20_000, told
    assert all(line.isprintable() for line in message.split("\n")), told
    for problem in error.problems:
        assert problem.message.isprintable() and problem.location.isprintable(), told


def meaning(data: dict[str, Any]) -> dict[str, Any]:
    """A spec as the plain reader sees it, without the freedom in how a thing is written."""

    def rule(written: dict[str, Any]) -> dict[str, Any]:
        blocks, layers = written["blocks"], written.get("layers", "all")
        if isinstance(layers, str) and "-" in layers:
            first, last = layers.split("-")
            layers = list(range(int(first), int(last) + 1))
        if isinstance(layers, dict):
            ((end, amount),) = layers.items()
            share = float(amount.rstrip("%")) if isinstance(amount, str) else None
            layers = "all" if share == 100 else (end, amount if share is None else share, share is None)
        return {
            "blocks": [blocks] if isinstance(blocks, str) else blocks,
            "layers": sorted(layers) if isinstance(layers, list) else layers,
            "without": written["without"],
        }

    return {**data, "connect": [rule(written) for written in data.get("connect", [])]}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_a_changed_spec(mutator: Mutator, seed: int, tmp_path: Path, deeds: list[str]) -> None:
    check(*case(mutator, seed), tmp_path, deeds)


@pytest.mark.slow
@pytest.mark.parametrize("mutator", MUTATORS, ids=lambda mutator: mutator.__name__)
def test_many_changed_specs(mutator: Mutator, tmp_path: Path, deeds: list[str]) -> None:
    for seed in range(12, 400):
        try:
            check(*case(mutator, seed), tmp_path, deeds)
        except BaseException as error:
            raise AssertionError(f"case {mutator.__name__}-{seed}") from error


# --- the worst of their kind ---------------------------------------------------------------------

HEAD = "fxskip: 1\nconnect:\n"
ROOM = 24_000  # bytes; what the reader takes is a little more
HEAVY = {
    "rules": HEAD + "".join(f"- {{blocks: a.{i}, without: [all@1]}}\n" for i in range(ROOM // 40)),
    "equal rules": HEAD + "- {blocks: moe, layers: 0-9999, without: [all@1]}\n" * (ROOM // 51),
    "long ranges": HEAD
    + "".join(f"- {{blocks: a.{i}, layers: 0-{9999 - i}, without: [all@1]}}\n" for i in range(ROOM // 55)),
    "one layer each": HEAD
    + "".join(f"- {{blocks: moe, layers: [{i}], without: [all@1]}}\n" for i in range(ROOM // 52)),
    "blocks": HEAD + f"- {{blocks: [{','.join(f'a.{i:x}' for i in range(ROOM // 7))}], without: [all@1]}}\n",
    "same blocks": HEAD + f"- {{blocks: [{'moe,' * (ROOM // 4 - 20)}], without: [all@1]}}\n",
    "addends": HEAD + f"- {{blocks: moe, without: [{','.join(f'all@{i}' for i in range(1, ROOM // 9))}]}}\n",
    "layers": HEAD
    + f"- {{blocks: moe, layers: [{','.join(map(str, range(ROOM // 6)))}], without: [all@1]}}\n",
    "wrong layers": HEAD + f"- {{blocks: moe, layers: [{'[],' * (ROOM // 3 - 20)}], without: [all@1]}}\n",
    "empty rules": HEAD + "- {}\n" * (ROOM // 5 - 5),
    "keys": "".join(f"k{i}: 1\n" for i in range(ROOM // 9)),
    "escapes": 'fxskip: 1\nname: "' + "\\x41" * (ROOM // 4 - 10) + '"\n',
    "comments": "fxskip: 1\n" + "#\n" * (ROOM // 3),
    "brackets": "[" * ROOM,
    "braces": "{a: " * (ROOM // 4),
    "questions": "? " * (ROOM // 2),
    "dashes": "x:\n" + "- " * (ROOM // 2),
    "stars in a glob": HEAD + f"- {{blocks: '{'*a' * (ROOM // 2 - 30)}b', without: [all@1]}}\n",
    "a long tag": f"fxskip: 1\nname: !<{'a' * (ROOM - 50)}> x\n",
    "a long key": f"fxskip: 1\n? {'k' * (ROOM - 50)}\n: x\n",
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_file_takes_little_time(name: str, tmp_path: Path) -> None:
    content = HEAVY[name].encode()
    assert len(content) < 24 << 10
    found = load(tmp_path / "heavy.yaml", content)
    if isinstance(found, SpecError):
        assert_well_told(found, Mutant(content, name, UNSURE), name)


LOAD_ALL = """
import pathlib, resource, sys
from fxskip.errors import SpecError
from fxskip.spec import load_spec

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

load_spec("farskip")
before = peak_kib()
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        load_spec(path)
    except SpecError as error:
        str(error)
    print(path.name, peak_kib() - before)
"""


def test_heavy_files_take_little_memory(tmp_path: Path) -> None:
    """The peak of a process of its own; it only grows, so the last line is the most that any file took."""
    for name, text in HEAVY.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    run = [sys.executable, "-c", LOAD_ALL, str(tmp_path)]
    printed = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert len(printed.splitlines()) == len(HEAVY)
    assert int(printed.split()[-1]) < MEMORY_MIB << 10, printed


# --- values from Python --------------------------------------------------------------------------


def _holding_itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "changes",
    [
        {"fxskip": 10**5000}, {"sum": 10**5000}, {"name": "a\nb"}, {"name": "\ud800"}, {"name": "x\x00"}, {"\ud800": 1},
        {1: 2}, {None: 1}, {("a",): 1}, {"connect": _holding_itself()}, {"connect": 7}, {"connect": [None]},
        {"connect": iter(())},
        {"connect": [{"blocks": _holding_itself(), "without": ["all@1"]}]},
        {"connect": [{"blocks": "moe", "layers": 10**5000, "without": ["all@1"]}]},
        {"connect": [{"blocks": "moe", "layers": {"last": float("nan")}, "without": ["all@1"]}]},
        {"connect": [{"blocks": "moe", "layers": {1: 1}, "without": ["all@1"]}]},
        {"connect": [{"blocks": "moe", "layers": [True], "without": ["all@1"]}]},
        {"connect": [{"blocks": "*.\ud800", "without": ["all@1"]}]},
        {"connect": [{"blocks": b"moe", "without": ["all@1"]}]},
        {"connect": [{"blocks": "moe", "without": {"all@1"}}]},
        {"connect": [{"blocks": "moe", "without": ["all@1"], "\x1b[2J": 1}]},
        {"schedule": {"costs": "./a\x00b"}}, {"schedule": {"max_in_flight_mib": True}},
        {"parallel": {"expert": {"size": 2.0}}},
        {"preset": "../../etc/passwd"}, {"preset": ["farskip"]}, {"preset": 10**5000},
    ],
    ids=lambda changes: ascii(next(iter(changes)))[:20],
)  # fmt: skip
def test_values_from_python_that_are_no_spec(changes: dict[Any, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec({"fxskip": 1, **changes})
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
