"""What operations a call runs, those inside fxskip's own operators included."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxskip.loss.operators import hidden_kl_operator, sparse_kl_operator

BODIES = {operator._opoverload: operator._init_fn for operator in (hidden_kl_operator, sparse_kl_operator)}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class Spy(TorchDispatchMode):
    """The largest number of elements that any operation returned, and how often each was run."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in BODIES:
            with self:  # one of ours is opaque to a mode; its body is not
                return BODIES[func](*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        result = func(*args, **(kwargs or {}))
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
