"""The text of a schedule."""

import pytest

from fxskip.errors import ScheduleError
from fxskip.schedule.solve import solve
from fxskip.schedule.tasks import TaskGraph
from fxskip.schedule.timeline import timeline
from tests.schedule.graphs import random_graph, task


def schedule():
    tasks = [
        task("gate0", cost_us=30.0),
        task("dispatch0", "ep", 90.0, bytes_in_flight=4096),
        task("core0", cost_us=70.0),
        task("experts0", cost_us=100.0),
        task("combine0", "ep", 60.0, bytes_in_flight=2048),
        task("add0", cost_us=20.0),
    ]
    needs = {
        "dispatch0": ["gate0"], "experts0": ["dispatch0"], "combine0": ["experts0"], "add0": ["combine0", "core0"],
    }  # fmt: skip
    return solve(TaskGraph(tasks, needs))


def test_a_row_a_lane_and_a_line_a_collective():
    assert (
        timeline(schedule(), title="tiny", width=40)
        == """\
tiny   estimated   total 300 us   exposed 80 us   1 column = 10 us
us       0         100       200       300
compute  [g][core0]  [experts0]      ||
ep          [dispatc]          [comb]

collective  start  end  bytes  us  exposed  waited by  hidden by
dispatch0   30     120  4,096  90  20       experts0   core0 70; its only consumer experts0 needs it next and nothing \
else is ready
combine0    220    280  2,048  60  60       add0       its only consumer add0 needs it next and nothing else is ready"""
    )


def test_a_part_of_it():
    text = timeline(schedule(), title="tiny", start_us=200, width=20)
    assert text.splitlines()[1:4] == [
        "us       200       250       300",
        "compute  [ex]            [ad]",
        "ep           [combine0..]",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_no_wider_than_asked(seed):
    lines = timeline(solve(random_graph(seed), seconds=0), title="t", width=60).partition("\n\n")[0]
    assert all(len(line) <= 60 + 10 for line in lines.splitlines()[2:])


@pytest.mark.parametrize(("start", "end"), [(300, None), (50, 50), (-1, 10)])
def test_a_part_without_time(start, end):
    with pytest.raises(ScheduleError, match="from 0 to 300 us"):
        timeline(schedule(), title="t", start_us=start, end_us=end)
