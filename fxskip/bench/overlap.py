"""How much communication is hidden on two GPUs: stock and FarSkip wiring, blocking, scheduled, and with nothing sent.

    fxskip bench overlap --out overlap.json

Decoders of DeepSeek-V2-Lite's shapes, experts over two ranks, forward and backward under a fixed gradient of the
output, no head and no optimizer. Every setting (layers, micro-batch, link) has fresh processes; its variants are timed
in turn, round by round, each time behind a step of its own that is not timed. Three conditions:

    real routing, real data       what training does
    routing in turn, real data    all experts get equally many tokens
    routing in turn, zero data    power is low, so the clock is constant

Figures are those of `fxskip.tracing.figures`, where each formula stands.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fxskip.bench.goals import print_verdicts, verdicts
from fxskip.bench.measure import FAILED, UNAVAILABLE, require_no_failures
from fxskip.bench.overlap_goals import REAL, TURN, ZERO, goals_of
from fxskip.bench.overlap_model import RANKS, WIRINGS, Setting
from fxskip.bench.overlap_ranks import MOVED_BY, Part, measure_alone, measure_mirrored, measure_pair
from fxskip.errors import FxskipError
from fxskip.tracing.processes import Body, in_processes

PAIR, MIRRORED, ALONE = "two ranks", "one rank and its mirror image", "one process"
CONDITIONS = (REAL, TURN, ZERO)
_OUT_OF_MEMORY = "OutOfMemoryError"


def run(out: Path, settings: Sequence[Setting], *, alone: bool = False) -> None:
    """Measure each setting on two ranks, and the smallest one in one process as well; that only, if `alone`.

    A mirrored setting is measured by one process, which is not repeated without a mesh.

    `out` is rewritten after each variant. Raises FxskipError at the end where something failed; what does not fit into
    memory is a finding.
    """
    report: dict[str, Any] = {"settings": []}
    started = time.monotonic()
    fewest = min(settings, key=lambda one: (one.layers, one.micro_batch))
    jobs: list[tuple[str, Setting, Body, int]] = [
        (MIRRORED, one, partial(measure_mirrored, one), 1)
        if one.is_mirrored
        else (PAIR, one, partial(measure_pair, one), RANKS)
        for one in ([] if alone else settings)
    ]
    if not fewest.is_mirrored:
        jobs.append((ALONE, fewest, partial(measure_alone, fewest), 1))
    for name, setting, body, ranks in jobs:
        found: dict[str, Any] = {"what": name} | _described(setting)
        report["settings"].append(found)
        for place, value in _parts(body, ranks, setting):
            _put(report if place == ("environment",) else found, place, value)
            out.write_text(json.dumps(report, indent=1) + "\n")
        print("\n".join(table(found)), flush=True)
        found["goals"] = verdicts(goals_of(found), found, ())
        print_verdicts(found["goals"], is_tiny=found["tiny"])
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"[done after {time.monotonic() - started:.0f} s]\n", flush=True)
    require_no_failures(
        report, who="bench overlap", repeat="repeat a setting with --layers and --micro-batch"
    )


def _parts(body: Body, ranks: int, setting: Setting) -> Iterator[Part]:
    """What the processes report, and in the end why they ended, if it was an error."""
    try:
        yield from in_processes(body, ranks, environment=setting.environment)
    except FxskipError as error:
        kind = UNAVAILABLE if _OUT_OF_MEMORY in str(error) else FAILED  # another rank may be the one to tell
        yield (kind,), f"{error.who}: {error.found}"


def _described(setting: Setting) -> dict[str, Any]:
    return {
        "layers": setting.layers,
        "micro_batch": setting.micro_batch,
        "tokens": setting.tokens,
        "choices": setting.config().num_experts_per_tok,
        "rounds": setting.rounds,
        "link": setting.link,
        "transport": setting.transport,
        "costs": "measured" if setting.measured_costs else "roofline",
        "tiny": setting.is_tiny,
    }


def _put(report: dict[str, Any], place: Sequence[str], value: Any) -> None:
    for name in place[:-1]:
        report = report.setdefault(name, {})
    report[place[-1]] = value


_HEAD = (
    "", "blocking", "scheduled", "nothing sent", "hidden", "over none", "coincidence f/b", "exposed", "stretch",
    "MHz", "W",
)  # fmt: skip


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines about one setting; times are milliseconds a step."""
    yield (
        f"{found['what']}: {found['layers']} layers, micro-batch {found['micro_batch']} x {found['tokens']} tokens, "
        f"{found['choices']} experts a token, "
        f"link {found['link']}, transport {found['transport']}, costs {found['costs']}"
        + (", tiny: times mean nothing" if found["tiny"] else "")
    )
    for kind in (FAILED, UNAVAILABLE):
        if kind in found:
            yield f"  {kind}: {found[kind]}"
    if found["what"] == ALONE:
        if "student over original" in found:
            yield f"  original {found['original']['step_ms']:.2f} ms, student {found['student']['step_ms']:.2f} ms"
            yield f"  student over original {found['student over original']:.3f}"
        return
    for wiring, choice in found.get(MOVED_BY, {}).items():
        yield f"  {wiring}: {MOVED_BY} {choice['chosen']} ({choice['why']})"
    rows: list[Sequence[str]] = [_HEAD]
    for condition in CONDITIONS:
        for wiring in WIRINGS:
            own = found.get(condition, {}).get(wiring, {})
            if "nothing sent" in own:  # the last mode: all three are there
                rows.append((f"{wiring}, {condition}", *_cells(own)))
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEAD))]
    for row in rows:
        cells = [f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells)
    yield from _comparisons(found)


def _cells(own: Mapping[str, Any]) -> Iterator[str]:
    blocking, scheduled, none = (own[mode]["step_ms"] for mode in ("blocking", "as it is", "nothing sent"))
    yield from (f"{ms:.2f}" for ms in (blocking, scheduled, none))
    yield f"{1 - (scheduled - none) / (blocking - none):.2f}" if blocking > none else "none to hide"
    yield f"x{scheduled / none:.3f}"
    trace = own.get("trace")
    if trace is None:
        yield from ("not traced", "", "")
    else:
        yield f"{trace['forward']['coincidence']:.2f} {trace['backward']['coincidence']:.2f}"
        yield f"{trace['step']['exposed_us'] / 1e3:.2f}"
        yield f"{trace['step']['stretch_us'] / 1e3:.2f}"
    clocks = [gpu for gpu in own["as it is"]["clocks"].values() if isinstance(gpu, Mapping)]
    yield "/".join(f"{gpu['mhz']:.0f}" for gpu in clocks) or "unknown"
    yield "/".join(f"{gpu['watts']:.0f}" for gpu in clocks) or "unknown"


def _comparisons(found: Mapping[str, Any]) -> Iterator[str]:
    """What is asked across rows."""
    real, turn, _ = (found.get(condition, {}) for condition in CONDITIONS)
    for wiring in WIRINGS:
        if "as it is" in real.get(wiring, {}) and "as it is" in turn.get(wiring, {}):
            ratio = real[wiring]["as it is"]["step_ms"] / turn[wiring]["as it is"]["step_ms"]
            yield f"  {wiring}: real routing over routing in turn x{ratio:.3f}"
    for condition in CONDITIONS:
        both = found.get(condition, {})
        if all("as it is" in both.get(wiring, {}) for wiring in ("stock", "farskip")):
            ratio = both["stock"]["as it is"]["step_ms"] / both["farskip"]["as it is"]["step_ms"]
            yield f"  {condition}: stock scheduled over FarSkip scheduled x{ratio:.3f}"
