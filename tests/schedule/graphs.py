"""Task graphs for the scheduler's tests: the decoder of the first study of overlap, and random ones."""

import random

from fxskip.schedule.tasks import Task, TaskGraph

COSTS = {
    "prep": 100.0, "core": 200.0, "gate": 20.0, "dispatch": 150.0, "experts": 300.0, "combine": 150.0,
    "shared": 80.0, "add": 5.0, "dense": 300.0,
}  # fmt: skip
"""Invented; the optima for them are known from CP-SAT."""
COLLECTIVES = ("dispatch", "combine")


def task(name, lane="compute", cost_us=10.0, **fields):
    return Task(name, lane, cost_us, **fields)


def decoder(layers, *, farskip, costs=COSTS):
    """One dense layer and then MoE layers. FarSkip: attention does not see the last routed output, an MLP not the
    attention before it."""
    tasks, needs = [], {}

    def add(layer, role, kind, *reads, cross=""):
        name = f"{layer}.{role}"
        lane = "expert" if kind in COLLECTIVES else "compute"
        tasks.append(
            Task(
                name,
                lane,
                costs[kind],
                layer=layer,
                role=role,
                bytes_in_flight=1000 if lane == "expert" else 0,
                kernel="short" if kind == "add" else "long",
                work="elementwise" if kind == "add" else "attention" if kind == "core" else "matrix",
                has_weights=kind in ("prep", "gate", "experts", "shared", "dense"),
                may_cross=cross,
            )
        )
        needs[name] = [read for read in reads if read]
        return name

    full = partial = ""
    for layer in range(layers):
        core = add(layer, "core", "core", add(layer, "prep", "prep", partial if farskip else full))
        before, after = full, add(layer, "attn_add", "add", core, full)
        seen = before if farskip else after
        if layer == 0:
            full = partial = add(layer, "mlp_add", "add", add(layer, "mlp", "dense", seen), after)
            continue
        dispatch = add(layer, "dispatch", "dispatch", add(layer, "gate", "gate", seen))
        partial = add(layer, "shared_add", "add", add(layer, "shared", "shared", seen), after)
        combine = add(layer, "combine", "combine", add(layer, "experts", "experts", dispatch))
        full = add(layer, "routed_add", "add", combine, partial, cross="next")
    return TaskGraph(tasks, needs)


def random_graph(seed, *, least=5, most=30, host=True):
    """Compute tasks, collectives of up to three groups, now and then a task of the host; any needs."""
    rng = random.Random(seed)
    lanes = ["expert", "tensor", "data"][: rng.randint(1, 3)]
    tasks, needs = [], {}
    for i in range(rng.randint(least, most)):
        draw = rng.random()
        lane = "host" if host and draw > 0.96 else rng.choice(lanes) if draw < 0.35 else "compute"
        is_collective = lane in lanes
        tasks.append(
            Task(
                f"t{i}",
                lane,
                round(rng.uniform(1, 100), 1),
                bytes_in_flight=rng.randint(1, 100) if is_collective else 0,
                kernel=rng.choice(["short", "long"]),
                work=rng.choice(["matrix", "attention", "elementwise"]),
            )
        )
        count = min(i, rng.choice([0, 1, 1, 2, 2, 3]))
        needs[f"t{i}"] = [f"t{j}" for j in rng.sample(range(max(0, i - 8), i), min(count, i, 8))]
    return TaskGraph(tasks, needs)
