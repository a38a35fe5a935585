"""One rank of the simulated machine: its host, its compute stream and its streams of collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxskip.schedule.machine import Contention, Machine
from fxskip.schedule.steps import Step
from fxskip.schedule.tasks import HOST, Task, TaskGraph
from fxskip.schedule.transfer import DONE, NEVER, Fault, FaultKind, Interval, Transfer

_NO_CONTENTION = Contention()


@dataclass(slots=True)
class _Issued:
    """A collective on one rank, from its issue to its end."""

    task: Task
    number: int
    """On its lane."""
    is_released: bool = False
    """All that was enqueued on the compute stream before its issue is done."""
    ready_us: float | None = None
    """When it gets its SMs."""
    behind: str = ""
    """The kernel that it waits behind for them."""
    began_us: float = 0.0
    transfer: Transfer | None = None


class Rank:
    """See `simulate`. `transfers` is what the ranks share."""

    def __init__(
        self,
        number: int,
        graph: TaskGraph,
        program: Sequence[Step],
        machine: Machine,
        transfers: dict[tuple[str, int], Transfer],
        communication: bool,
    ) -> None:
        self.number, self._graph, self._program = number, graph, program
        self._machine, self._transfers, self._communication = machine, transfers, communication
        self.intervals: list[Interval] = []
        self.faults: list[Fault] = []
        self.running: Task | None = None
        self._began = self._left = 0.0
        self._next = 0
        self._launching: Step | None = None
        self._host_free = 0.0
        self._queue: deque[tuple[str, Task]] = deque()
        self._lanes: dict[str, deque[_Issued]] = {lane: deque() for lane in graph.lanes}
        self._issued: dict[str, _Issued] = {}
        self._count = dict.fromkeys(graph.lanes, 0)
        self._done: set[str] = set()
        self._waited: set[str] = set()
        self._readers = {task.name: set(graph.consumers(task.name)) for task in graph if task.bytes_in_flight}
        self._in_flight = 0
        self.peak_bytes = 0

    def settle(self, now: float) -> bool:
        """Do what takes no time; whether anything was done. A kernel is faster at a free SM than a collective."""
        return any([self._end(now), self._host(now), self._compute(now), self._collectives(now)])

    def next_event(self, now: float) -> float:
        times = [NEVER]
        if self._launching is not None:
            times.append(self._host_free)
        if self.running is not None:
            times.append(now + self._left * self._slowness)
        for lane in self._lanes.values():
            if lane and lane[0].transfer is not None:
                times.append(lane[0].transfer.end(now))
            elif lane and lane[0].ready_us is not None and lane[0].ready_us > now:
                times.append(lane[0].ready_us)
        return min(times)

    def advance(self, us: float) -> None:
        if self.running is not None:
            self._left -= us / self._slowness

    @property
    def _slowness(self) -> float:
        """Of the kernel that runs, by the collectives beside it."""
        assert self.running is not None
        beside = [
            self._contention(lane).stretch[self.running.work]
            for lane, queue in self._lanes.items()
            if queue and queue[0].transfer is not None
        ]
        return max(beside, default=1.0)

    def _contention(self, lane: str) -> Contention:
        return self._machine.contention.get(lane, _NO_CONTENTION) if self._communication else _NO_CONTENTION

    def _end(self, now: float) -> bool:
        ended = False
        if self.running is not None and self._left <= DONE:
            self._finish(self.running, self._began, now)
            self.running, ended = None, True
        for lane in self._lanes.values():
            if lane and lane[0].transfer is not None and lane[0].transfer.is_done:
                self._finish(lane[0].task, lane[0].began_us, now)
                lane.popleft()
                ended = True
        return ended

    def _finish(self, task: Task, began: float, now: float) -> None:
        self.intervals.append(Interval(task.name, task.lane, began, now))
        self._done.add(task.name)
        if not task.is_collective:
            self._release(task)

    def _release(self, reader: Task) -> None:
        """A value in flight is given up by its last reader; what a collective sends on is its own from then on."""
        for producer in self._graph.producers(reader.name):
            readers = self._readers.get(producer, set())
            if reader.name in readers:
                readers.remove(reader.name)
                if not readers:
                    self._in_flight -= self._graph[producer].bytes_in_flight

    def _host(self, now: float) -> bool:
        did = False
        while now >= self._host_free:
            if self._launching is not None:
                step, self._launching = self._launching, None
                self._enqueue(step, now)
                did = True
            if self._next == len(self._program):
                break
            step = self._program[self._next]
            if step.task not in self._graph:
                self._fault("unknown", step.task, f"step {self._next} is {step}, and no such task exists")
                self._next += 1
                continue
            task = self._graph[step.task]
            if task.lane == HOST and not self._done.issuperset(self._graph.producers(task.name)):
                break  # the host waits for what it reads
            own = task.cost_us if task.lane == HOST else 0.0 if step.action == "wait" else task.host_us
            self._launching, self._began_host = step, now
            self._host_free = now + own + self._machine.launch_us
            self._next += 1
            did = True
        return did

    def _enqueue(self, step: Step, now: float) -> None:
        task = self._graph[step.task]
        if step.action == "wait":
            self._queue.append(("wait", task))
        elif task.lane == HOST:
            self._is_first(task)
            self._finish(task, self._began_host, now)
        elif step.action == "start":
            if not self._is_first(task):
                return
            issued = _Issued(task, self._count[task.lane])
            self._count[task.lane] += 1
            self._issued[task.name] = issued
            self._lanes[task.lane].append(issued)
            self._queue.append(("release", task))
        else:
            self._queue.append(("run", task))

    def _is_first(self, task: Task) -> bool:
        is_first = task.name not in self._done and task.name not in self._issued
        if not is_first:
            self._fault("repeated", task.name, f"{task.name} is done a second time")
        return is_first

    def _compute(self, now: float) -> bool:
        did = False
        while self.running is None and self._queue:
            action, task = self._queue[0]
            if action == "wait" and task.name not in self._done:
                break
            self._queue.popleft()
            did = True
            if action == "wait":
                self._waited.add(task.name)
            elif action == "release":
                self._issued[task.name].is_released = True
                self._in_flight += task.bytes_in_flight
                self.peak_bytes = max(self.peak_bytes, self._in_flight)
                self._release(task)
            else:
                self._is_first(task)
                self._check_reads(task)
                self.running, self._began, self._left = task, now, task.cost_us
        return did

    def _collectives(self, now: float) -> bool:
        did = False
        for lane, queue in self._lanes.items():
            if not queue or queue[0].transfer is not None or not queue[0].is_released:
                continue
            head, contention = queue[0], self._contention(lane)
            if head.ready_us is None:
                head.ready_us = now
                if self.running is not None:
                    head.behind = self.running.name
                    head.ready_us += contention.start_delay_us(self.running, now - self._began)
                did = True
            if now < head.ready_us and self.running is not None and self.running.name == head.behind:
                continue
            head.ready_us = min(head.ready_us, now)
            did |= self._enter(head, contention, now)
        return did

    def _enter(self, head: _Issued, contention: Contention, now: float) -> bool:
        """The collective's kernel starts on this rank. False if the others are in another collective."""
        cost = head.task.cost_us if self._communication else 0.0
        place = (head.task.lane, head.number)
        if place not in self._transfers:
            self._transfers[place] = Transfer(head.task, cost, contention, self._machine.ranks)
        transfer = self._transfers[place]
        if transfer.name != head.task.name:
            return False
        self._check_reads(head.task)
        transfer.left = max(transfer.left, cost)
        transfer.inside.append(self)
        head.transfer, head.began_us = transfer, now
        return True

    def _check_reads(self, task: Task) -> None:
        for producer in self._graph.producers(task.name):
            source = self._graph[producer]
            if producer not in self._done:
                self._fault("early read", task.name, f"{task.name} reads {producer}, which is not there yet")
            elif source.is_collective and source.lane != task.lane and producer not in self._waited:
                text = f"{task.name} reads {producer} without a wait; this time it had arrived"
                self._fault("early read", task.name, text)

    def _fault(self, kind: FaultKind, task: str, text: str) -> None:
        self.faults.append(Fault(kind, self.number, task, text))

    def conclude(self) -> Iterable[Fault]:
        """All faults, once nothing happens any more."""
        stuck = list(self._stuck())
        yield from self.faults
        if stuck:
            yield Fault("deadlock", self.number, stuck[0][0], "; ".join(text for _, text in stuck))
            return
        for task in self._graph:
            if task.name not in self._done:
                yield Fault("missing", self.number, task.name, f"{task.name} is never done")

    def _stuck(self) -> Iterable[tuple[str, str]]:
        for lane, queue in self._lanes.items():
            if queue and not queue[0].is_released:
                yield queue[0].task.name, f"{queue[0].task.name} waits for the compute stream"
            elif queue:
                place = (lane, queue[0].number)
                others = self._transfers[place].name
                name = queue[0].task.name
                why = (
                    "which not every rank issues" if others == name else f"where another rank is in {others}"
                )
                yield name, f"collective {queue[0].number} on the lane {lane} is {name}, {why}"
        if self._queue:
            action, task = self._queue[0]
            yield task.name, f"the compute stream is at {action} {task.name}"
        if self._next < len(self._program):
            yield (
                self._program[self._next].task,
                f"the host is at step {self._next}: {self._program[self._next]}",
            )
