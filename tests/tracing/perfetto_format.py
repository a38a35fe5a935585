"""What Chrome's trace event format asks of a file, written from the format's description."""

from typing import Any


def assert_valid(file: dict[str, Any]) -> None:
    """Each event has what its kind needs; arrows have two ends, in order, each inside of a slice on its thread."""
    assert isinstance(file["traceEvents"], list)
    assert file["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    ends: dict[int, dict[str, dict[str, Any]]] = {}
    named: set[tuple[int, int]] = set()
    for event in file["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name", "process_sort_index", "thread_name", "thread_sort_index",
            )  # fmt: skip
            key = "name" if event["name"].endswith("_name") else "sort_index"
            assert event["args"].keys() == {key}
            if event["name"] == "thread_name":
                named.add(place)
            continue
        assert event["ts"] >= 0 and event["name"] and event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["ph"] in ("s", "f")
            assert event["ph"] == "s" or event["bp"] == "e"
            assert event["ph"] not in ends.setdefault(event["id"], {})
            ends[event["id"]][event["ph"]] = event
    assert set(slices) <= named
    for pair in ends.values():
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for event in pair.values():
            around = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in around), event
