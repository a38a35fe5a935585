"""How far the scheduler's orders are from the optimum, and how long they take; what modelling contention changes.

    python benchmarks/schedule_optimality.py --out benchmarks/results/schedule-optimality.json

Graphs: DeepSeek-V2-Lite's decoder, 27 and 61 layers of it, stock and FarSkip, forward and backward, the latter with and
without weight gradients of their own; costs by the roofline and invented ones; communication 1, 1.5, 2 and 3 times as
long. A schedule that reaches the lower bound of its problem is optimal, whoever found it. Where it does not, and for
all steps of up to `--cp-layers` layers, CP-SAT gets `--cp-seconds`. No GPU is used: these are estimates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from provenance import provenance
from schedule_graphs import COLLECTIVES, INVENTED, decoder, roofline_costs

from fxskip.schedule.derive_backward import derive_backward
from fxskip.schedule.hardware import load_hardware
from fxskip.schedule.machine import Machine, contention_of
from fxskip.schedule.optimal import solve_optimal
from fxskip.schedule.overlap import overlap_figures
from fxskip.schedule.problem import OrderRule
from fxskip.schedule.solve import solve
from fxskip.schedule.tasks import TaskGraph
from fxskip.transport import Transport

RULES: tuple[OrderRule, ...] = ("free", "layers", "periodic")
TRANSPORTS: tuple[Transport, ...] = ("nccl", "copy_engine")
PROVEN = 1e-6
"""Relative distance from the bound that is rounding."""


def graphs(layers: int, times: float, costs: dict[str, float]) -> Iterator[tuple[str, TaskGraph]]:
    """Each wiring and phase, with its name."""
    longer = costs | {name: times * costs[name] for name in COLLECTIVES}
    for farskip in (False, True):
        wiring = "farskip" if farskip else "stock"
        forward = decoder(longer, layers=layers, farskip=farskip)
        yield f"{wiring} forward", forward
        yield f"{wiring} backward", derive_backward(forward)
        yield f"{wiring} backward, weight gradients split", derive_backward(forward, split_weights=True)


def optimality(graph: TaskGraph, cp_seconds: float, *, always: bool) -> dict[str, Any]:
    """The schedule of each rule against the bound on all orders."""
    row: dict[str, Any] = {"tasks": len(graph)}
    bound = 0.0
    best = float("inf")
    for rule in RULES:
        wall, cpu = time.perf_counter(), time.process_time()
        schedule = solve(graph, rule=rule)
        row[rule] = {
            "makespan_us": schedule.makespan_us,
            "hidden": round(schedule.hidden_share, 4),
            "method": schedule.method,
            "wall_s": round(time.perf_counter() - wall, 3),
            "cpu_s": round(time.process_time() - cpu, 3),
        }
        bound = max(bound, schedule.lower_bound_us)
        best = min(best, schedule.makespan_us)
    row["bound_from"] = "lower bound"
    if always or best > bound * (1 + PROVEN):
        found = solve_optimal(graph, seconds=cp_seconds)
        row["cp_sat"] = {
            "makespan_us": found.schedule.makespan_us,
            "bound_us": found.bound_us,
            "is_optimal": found.is_optimal,
            "seconds": round(found.seconds, 2),
        }
        if found.bound_us > bound * (1 + PROVEN):
            bound, row["bound_from"] = found.bound_us, "CP-SAT"
    row["bound_us"] = bound
    for rule in RULES:
        row[rule]["of_optimum"] = round(min(1.0, bound / row[rule]["makespan_us"]), 6)
    return row


def contention(graph: TaskGraph, transport: Transport) -> dict[str, Any]:
    """Figures of an order chosen by makespan, and of one chosen by simulation with contention."""
    found = contention_of(load_hardware("h200"), transport)
    assert found is not None
    machine = Machine(contention={"expert": found})
    row = {}
    for name, chosen_by in (("by makespan", None), ("by simulation", machine)):
        began = time.perf_counter()
        schedule = solve(graph, machine=chosen_by)
        seconds = time.perf_counter() - began
        figures = overlap_figures(graph, schedule.steps, machine)
        row[name] = {
            "hidden": round(figures.hidden, 4),
            "coincidence": round(figures.coincidence, 4),
            "exposed_us": round(figures.exposed_us, 1),
            "stretch_us": round(figures.stretch_us, 1),
            "step_us": round(figures.step_us, 1),
            "none_us": round(figures.none_us, 1),
            "blocking_us": round(figures.blocking_us, 1),
            "wall_s": round(seconds, 3),
        }
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all graphs, by rule."""
    return {
        rule: {
            "of_optimum_mean": round(statistics.mean(row[rule]["of_optimum"] for row in rows), 6),
            "of_optimum_least": min(row[rule]["of_optimum"] for row in rows),
            "proven_optimal": sum(row[rule]["of_optimum"] > 1 - 10 * PROVEN for row in rows),
            "graphs": len(rows),
            "wall_s_most": max(row[rule]["wall_s"] for row in rows),
            "cpu_s_most": max(row[rule]["cpu_s"] for row in rows),
        }
        for rule in RULES
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--layers", type=int, nargs="+", default=[27, 61])
    parser.add_argument("--cp-seconds", type=float, default=20.0, help="of CP-SAT for one graph")
    parser.add_argument(
        "--cp-layers", type=int, default=27, help="run CP-SAT on all steps of up to so many layers"
    )
    arguments = parser.parse_args()
    report: dict[str, Any] = provenance()
    tables = {"roofline": roofline_costs(), "invented": INVENTED}
    report["costs_us"] = tables
    report["optimality"] = []
    for table, costs in tables.items():
        for layers in arguments.layers:
            for times in (1.0, 1.5, 2.0, 3.0):
                for name, graph in graphs(layers, times, costs):
                    row = {"costs": table, "layers": layers, "communication": times, "graph": name}
                    row |= optimality(graph, arguments.cp_seconds, always=layers <= arguments.cp_layers)
                    report["optimality"].append(row)
                    print(
                        table,
                        layers,
                        times,
                        name,
                        {rule: row[rule]["of_optimum"] for rule in RULES},
                        flush=True,
                    )
    report["summary"] = summary(report["optimality"])
    report["contention"] = [
        {"transport": transport, "layers": 27, "graph": name} | contention(graph, transport)
        for transport in TRANSPORTS
        for name, graph in graphs(27, 1.0, tables["roofline"])
    ]
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))


if __name__ == "__main__":
    main()
