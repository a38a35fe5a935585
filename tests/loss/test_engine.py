"""The order in which the engine works: what it begins, exchanges and multiplies, and what runs under what."""

import torch

from fxskip.loss import engine
from fxskip.loss.engine import Chunking, Problem, Wanted, form
from fxskip.loss.products import multiply_into

TOKENS, WIDTH, VOCABULARY = 10, 5, 7


class Recorded:
    """A row loss, a group and products that write down when they are called."""

    def __init__(self):
        self.events = []

    def begin(self, product_tV, gradient_tV, rows, spare):
        number = rows.start
        self.events.append(f"begin {number}")
        assert gradient_tV.data_ptr() == product_tV.data_ptr()

        def finish():
            self.events.append(f"finish {number}")
            gradient_tV.fill_(1.0)
            return torch.ones(len(product_tV))

        return finish

    def multiply_into(self, out, left, right, *, add=False):
        kind = {
            (WIDTH, VOCABULARY): "logits",
            (VOCABULARY, WIDTH): "d hidden",
        }.get(tuple(right.shape), "d weight")
        self.events.append(f"{kind} += {len(left)}" if add else f"{kind} = {len(left)}")
        multiply_into(out, left, right, add=add)

    def reduced(self, tensor, group):
        number = len([event for event in self.events if event.startswith("reduce")])
        self.events.append(f"reduce {number}")
        tensor.mul_(2.0)  # as if a second rank had as much

        class Work:
            def wait(_):
                self.events.append(f"wait {number}")

        return Work()


def test_exchanges_run_under_the_products_of_other_chunks(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(engine, "reduced", recorded.reduced)
    monkeypatch.setattr(engine, "multiply_into", recorded.multiply_into)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    chunking = Chunking(chunk_tokens=3, accumulate=2, logits_dtype=torch.float32)
    group = object()
    formed = form(Problem(recorded, hidden, weight, None, Wanted(True, True, False), chunking, group))
    assert recorded.events == [
        # The exchange that begins with a chunk has the next chunk's product to hide under ...
        "logits = 3", "begin 0", "logits = 3", "begin 3",
        # ... and the sum of d hidden over ranks, once a chunk, has all that follow.
        "finish 0", "d hidden = 3", "reduce 0", "finish 3", "d hidden = 3", "reduce 1", f"d weight = {VOCABULARY}",
        "logits = 3", "begin 6", "logits = 1", "begin 9",
        "finish 6", "d hidden = 3", "reduce 2", "finish 9", "d hidden = 1", "reduce 3", f"d weight += {VOCABULARY}",
        "wait 0", "wait 1", "wait 2", "wait 3",
    ]  # fmt: skip
    assert formed.loss.item() == TOKENS
    ones = torch.ones(TOKENS, VOCABULARY)
    torch.testing.assert_close(formed.hidden, 2.0 * ones @ weight)
    torch.testing.assert_close(formed.weight, ones.T @ hidden)
