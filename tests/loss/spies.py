"""What operations a call runs and what they hold, those inside fxskip's own operators included."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fxskip.loss.feature_loss import feature_loss_operator
from fxskip.loss.operators import hidden_kl_operator, sparse_kl_operator


def interpret_in_place(monkeypatch):
    """Triton's interpreter copies tensors to the host and whole storages back. Those of a CPU are there already; the
    copies would keep memory alive, and touch all of it."""
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


OPERATORS = feature_loss_operator, hidden_kl_operator, sparse_kl_operator
BODIES = {operator._opoverload: operator._init_fn for operator in OPERATORS}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Spy(TorchDispatchMode):
    """The largest number of elements that any operation returned, how often each was run, and FLOPs of products."""

    def __init__(self):
        super().__init__()
        self.elements = self.flops = 0
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in BODIES:
            with self:  # one of ours is opaque to a mode; its body is not
                return BODIES[func](*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        result = func(*args, **(kwargs or {}))
        if name in ("mm", "addmm"):
            left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result

    @property
    def products(self):
        return sum(self.calls.get(name, 0) for name in PRODUCTS)

    @property
    def host_reads(self):
        return self.calls.get("_local_scalar_dense", 0) + self.calls.get("nonzero", 0)


class Ledger(TorchDispatchMode):
    """Bytes of the tensors that operations inside made and that are alive: now, and at most."""

    def __init__(self, *inputs):
        super().__init__()
        self.known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in inputs})
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in BODIES:
            with self:
                result = BODIES[func](*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        self.known[storage] = True
        self.change(storage.nbytes())
        weakref.finalize(storage, self.change, -storage.nbytes())

    def change(self, size):
        self.live += size
        self.peak = max(self.peak, self.live)
