"""`miles doctor loss` with everything that is fp32 computed in fp64 instead: what is left of a difference is no rounding."""

# python -m tests.fast.fsdp.double_doctor FOLDER    in place of python -m miles.doctor.ranks FOLDER

import sys

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

from miles.backends.fsdp_utils import critic, roles, worker
from miles.backends.fsdp_utils import model as fsdp_model
from miles.doctor import ranks


def wider(value):
    return torch.float64 if value is torch.float32 else value


class InDouble(TorchFunctionMode):
    """Casts to fp32, of norms, of rotary embeddings and of the trainer itself, are casts to fp64."""

    loading = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.loading:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


def in_double(load, mode):
    """A loader of models, whose parameters and buffers it makes fp64."""

    def loaded(*args, **kwargs):
        mode.loading = True
        torch.set_default_dtype(torch.float32)
        found, stored = load(*args, **kwargs)
        torch.set_default_dtype(torch.float64)
        mode.loading = False
        return found.double(), stored

    return loaded


def main(folder):
    mode = InDouble()
    fsdp_model.MixedPrecisionPolicy = lambda **kwargs: MixedPrecisionPolicy()
    worker.load_policy = roles.load_policy = in_double(worker.load_policy, mode)
    critic.load_critic = in_double(critic.load_critic, mode)
    torch.set_default_dtype(torch.float64)
    with mode:
        return ranks.main(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
