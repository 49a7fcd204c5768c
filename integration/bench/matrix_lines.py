"""The lines of the workload matrix: what each runs, what it needs, and what is expected of it. Only the standard library."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from supervised import ROOT

JOBS = ROOT / "integration/jobs"
# The ranks talk on this machine only; by default they look for a card to the outside, which may not be there.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def nccl(keys):
    """What NCCL needs so that a checkpoint of its ranks can be restored. A rekindle with gpu.nccl sees to it itself."""
    return {} if "gpu.nccl" in keys else {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"}


def nothing(_keys):
    return {}


def ranked(keys):
    return {**LOOPBACK, **nccl(keys)}


def expandable(_keys):
    # The second is the name of before PyTorch 2.9.
    return dict.fromkeys(["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"], "expandable_segments:True")


@dataclass(frozen=True)
class Line:
    name: str
    # For a reader of the table.
    what: str
    # The script in jobs/ and its mode.
    job: tuple
    # Names of WARM_UP.
    needs: tuple = ()
    # GPUs that the line needs, and ranks: processes that write steps.
    gpus: int = 1
    ranks: int = 1
    environment: Callable = nothing
    settings: dict = field(default_factory=dict)
    # "usual", "two" jobs at the same time, or "migrate".
    how: str = "usual"
    # "works", or "refused" with words that have to be in what the user sees.
    expected: str = "works"
    words: str = ""
    # Seconds, from its start on.
    limit: float = 90
    # Files of the stand-in driver, for the self-test.
    faults: dict = field(default_factory=dict)
    # Two ports from here on are the job's, two from 10 and from 20 on those of the uninterrupted runs.
    port: int = 0

    def command(self, port):
        script, *mode = self.job
        run = [JOBS / script] if script.endswith(".sh") else [sys.executable, JOBS / script]
        return [*run, *mode, *(["--port", port] if self.ranks > 1 else [])]


TORCH, JAX, KERNELS, STACKS = "matrix_torch.py", "matrix_jax.py", "matrix_kernels.py", "matrix_stacks.py"


def numbered(lines):
    """With a port for each, out of the range that the kernel gives to clients."""
    return [Line(**{**line.__dict__, "port": 10100 + 40 * number}) for number, line in enumerate(lines)]


# In the order of the table.
LINES = numbered([
    Line("eager", "PyTorch, eager", (TORCH, "eager"), ("torch",)),
    Line("compile", "PyTorch, torch.compile", (TORCH, "compile"), ("torch",), limit=150),
    Line("amp", "PyTorch, autocast and GradScaler", (TORCH, "amp"), ("torch",)),
    Line("loader-fork", "DataLoader, 4 workers by fork, pinned memory", (TORCH, "loader-fork"), ("torch",)),
    Line("loader-spawn", "DataLoader, 4 workers by spawn, pinned memory", (TORCH, "loader-spawn"), ("torch",)),
    Line("expandable", "PyTorch, expandable segments", (TORCH, "expandable"), ("torch",), environment=expandable),
    Line("graphs", "PyTorch, CUDA graphs", (TORCH, "graphs"), ("torch",)),
    Line("ddp-gloo", "DDP, gloo", (TORCH, "ddp-gloo"), ("torch",), 2, 2, ranked),
    Line("ddp-nccl", "DDP, NCCL", (TORCH, "ddp-nccl"), ("torch",), 2, 2, ranked),
    Line("no-peer", "DDP, NCCL, gpu.nccl = \"no-peer\"", (TORCH, "ddp-nccl"), ("torch",), 2, 2, ranked,
         settings={"gpu.nccl": "no-peer"}),
    Line("fsdp", "FSDP (fully_shard), NCCL", (TORCH, "fsdp"), ("torch",), 2, 2, ranked),
    Line("torchrun", "a shell script around torchrun, DDP, NCCL", ("matrix_torchrun.sh", "ddp-nccl"), ("torch",), 2, 2, ranked),
    Line("jit", "JAX, jit", (JAX, "jit"), ("jax",)),
    Line("pmap", "JAX, pmap on two GPUs", (JAX, "pmap"), ("jax",), 2),
    Line("cupy", "CuPy", (KERNELS, "cupy"), ("cupy",)),
    Line("triton", "Triton", ("matrix_triton.py",), ("torch", "triton")),
    Line("numba", "numba-cuda", (KERNELS, "numba"), ("numba",)),
    Line("trainer", "Hugging Face Trainer, 2 DataLoader workers", ("matrix_trainer.py",), ("torch", "transformers")),
    Line("lightning", "PyTorch Lightning; imports mpi4py", (STACKS, "lightning"), ("lightning", "mpi")),
    Line("accelerate", "Hugging Face Accelerate", (STACKS, "accelerate"), ("transformers",)),
    Line("checkpoint", "torch.distributed.checkpoint beside each step", (STACKS, "checkpoint"), ("torch",)),
    Line("tensorboard", "TensorBoard in each step", (STACKS, "tensorboard"), ("torch", "tensorboard")),
    Line("mpi", "mpi4py in one process (Open MPI starts orted)", (STACKS, "mpi"), ("torch", "mpi")),
    Line("mpirun", "mpirun, two ranks, sums through MPI", ("matrix_mpirun.sh", "mpirun"), ("torch", "mpi"), ranks=2),
    Line("deepspeed", "DeepSpeed, ZeRO-2, one rank", (STACKS, "deepspeed"), ("torch", "deepspeed")),
    Line("short", "a shell loop over short CUDA programs", ("matrix_short.sh",), ("nvcc",)),
    Line("shared", "two jobs and two other programs on one GPU", (TORCH, "eager"), ("torch",), how="two"),
    Line("managed", "CuPy, managed memory", (KERNELS, "managed"), ("cupy",), expected="refused", words="managed memory"),
    Line("two-jobs", "two jobs on two GPUs at the same time", (TORCH, "eager"), ("torch",), 2, how="two"),
    Line("migrate", "PyTorch, from GPU 0 to GPU 1", (TORCH, "eager"), ("torch",), 2, how="migrate"),
])  # fmt: skip

HOST = "matrix_host.py"
# With the stand-in driver and no GPU: whether the matrix itself works.
SELF_TEST = numbered([
    Line("host", "two processes and a pipe", (HOST, "host"), ranks=2),
    Line("standin", "two processes with the stand-in driver", (HOST, "standin"), ranks=2),
    Line("managed", "a driver that refuses", (HOST, "standin"), ranks=2, expected="refused", words="managed memory",
         faults={"fail-checkpoint": "801"}),
    Line("two-jobs", "two jobs at the same time", (HOST, "standin"), gpus=2, ranks=2, how="two"),
])  # fmt: skip

# A program that each need is tried with: it reads the libraries from the disk, which the first job would else wait for.
WARM_UP = {
    "torch": "import torch; x = torch.ones(64, 64, device='cuda'); (x @ x).sum().item(); print(torch.__version__)",
    "transformers": "import accelerate, transformers; from transformers import GPT2LMHeadModel, Trainer; print(transformers.__version__)",
    "lightning": "import lightning; print(lightning.__version__)",
    "tensorboard": "import tensorboard; print(tensorboard.__version__)",
    "deepspeed": "import deepspeed; print(deepspeed.__version__)",
    "nvcc": "import shutil, subprocess\nif not shutil.which('nvcc'): raise ModuleNotFoundError('nvcc')\nprint(subprocess.check_output(['nvcc', '--version'], text=True).split()[-1])",
    "mpi": "import mpi4py.MPI as MPI; print(MPI.Get_library_version().split(',')[0])",
    "triton": "import triton; print(triton.__version__)",
    "jax": "import os; os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'; import jax; jax.numpy.ones(8).sum().item(); print(jax.__version__)",
    "cupy": "import cupy; cupy.arange(8).sum().get(); print(cupy.__version__)",
    "numba": "import numba_cuda, numpy; numpy.row_stack = numpy.vstack; from numba import cuda; cuda.to_device(numpy.ones(8)); print(numba_cuda.__version__)",
}
