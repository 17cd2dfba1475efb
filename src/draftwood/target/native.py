"""The compiled kernels of ``native.cpp``: built once per machine with its C++ compiler, if any."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from ctypes import CDLL, RTLD_GLOBAL, c_float, c_int, c_long, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from draftwood.target.arena import Arena
from draftwood.target.store import cache_dir

SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fno-exceptions", "-fno-rtti", "-fno-trapping-math",
    "-fno-math-errno", "-fno-threadsafe-statics", "-fPIC", "-shared", "-nostdlib",
)  # fmt: skip
LIBRARIES = ("-lc", "-lm")
TIMEOUT_S = 300.0  # seconds of work, but other processes may be at it too


_FAILED = "the compiled kernels could not be built"


class Linear(ctypes.Structure):
    """As in ``native.cpp``."""

    _fields_ = (("w", c_void_p), ("bias", c_void_p), ("K", c_long), ("O", c_long))


class View(ctypes.Structure):
    """As in ``native.cpp``."""

    _fields_ = (
        ("K", c_void_p), ("V", c_void_p), ("k_head", c_long), ("k_row", c_long),
        ("v_head", c_long), ("v_row", c_long), ("mask", c_void_p), ("mask_row", c_long),
        ("start", c_long), ("n", c_long), ("L", c_long), ("causal", c_long),
        ("new_K", c_void_p), ("new_V", c_void_p),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """As in ``native.cpp``."""

    _fields_ = (
        ("qkv", Linear), ("out", Linear), ("gate_up", Linear), ("down", Linear),
        ("norm_in", c_void_p), ("norm_mlp", c_void_p), ("norm_q", c_void_p), ("norm_k", c_void_p),
        ("eps_in", c_float), ("eps_mlp", c_float), ("eps_q", c_float), ("eps_k", c_float),
        ("scale", c_float), ("H", c_long), ("I", c_long), ("heads", c_long), ("kv_heads", c_long),
        ("D", c_long),
    )  # fmt: skip


class Native:
    """The loaded library.

    Attributes:
        panel: outputs per panel of packed weights.
        vector: floats per vector; head sizes must be a multiple.
        has_half: whether there are products in bfloat16.
        qkv, rest, stack, stack_half, linear, linear_half: see ``native.cpp``.
    """

    def __init__(self, library: CDLL) -> None:
        library.dw_qkv.argtypes = [c_void_p] * 6 + [c_long, c_int]
        library.dw_rest.argtypes = [c_void_p] * 4 + [c_long] + [c_void_p] * 4 + [c_long, c_int]
        library.dw_stack.argtypes = [
            c_void_p, c_long, *[c_void_p] * 4, c_long, *[c_void_p] * 5, c_long, c_int
        ]  # fmt: skip
        library.dw_stack_half.argtypes = library.dw_stack.argtypes
        for product in (library.dw_linear, library.dw_linear_half):
            product.argtypes = [c_void_p] * 3 + [c_long, c_int]
        for pack in (library.dw_pack, library.dw_pack_half):
            pack.argtypes = [c_void_p, c_void_p, c_long, c_long, c_long, c_int]
        self.qkv: Callable[..., Any] = library.dw_qkv
        self.rest: Callable[..., Any] = library.dw_rest
        self.stack: Callable[..., Any] = library.dw_stack
        self.stack_half: Callable[..., Any] = library.dw_stack_half
        self.linear: Callable[..., Any] = library.dw_linear
        self.linear_half: Callable[..., Any] = library.dw_linear_half
        self._pack: Callable[..., Any] = library.dw_pack
        self._pack_half: Callable[..., Any] = library.dw_pack_half
        self._arena = Arena()
        self.panel = int(library.dw_panel())
        self.vector = int(library.dw_vector())
        self.has_half = bool(library.dw_has_half())

    def packed(self, *matrices: torch.Tensor) -> torch.Tensor:
        """Matrices [out, in] of one shape in panels of ``panel`` outputs, those of all in turn."""
        return self._in_panels(self._pack, matrices, matrices[0].shape[1])

    def packed_half(self, *matrices: torch.Tensor) -> torch.Tensor:
        """As ``packed``, rounded to bfloat16; two numbers in each float32, so ``in`` is even."""
        inputs = matrices[0].shape[1]
        assert inputs % 2 == 0
        return self._in_panels(self._pack_half, matrices, inputs // 2)

    def _in_panels(
        self, pack: Callable[..., Any], matrices: Sequence[torch.Tensor], floats: int
    ) -> torch.Tensor:
        """``floats``: that one output's weights take."""
        outputs, inputs = matrices[0].shape
        stride, panel = len(matrices), self.panel * floats
        buffer = self._arena.take(-(-outputs // self.panel) * panel * stride)
        for index, matrix in enumerate(matrices):
            assert matrix.shape == (outputs, inputs)
            start = buffer.data_ptr() + 4 * index * panel
            rows = matrix.contiguous()
            pack(rows.data_ptr(), start, inputs, outputs, stride, torch.get_num_threads())
        return buffer


@lru_cache(maxsize=1)
def load_native() -> Native | None:
    """The kernels, compiled into the cache folder at the first call on a machine.

    None where they cannot be had; with a warning where they should have been.
    """
    native, why = find_native()
    if native is None and why.startswith(_FAILED):
        warnings.warn(f"{why}; decoding on this CPU is several times slower", stacklevel=2)
    return native


def find_native() -> tuple[Native | None, str]:
    """As ``load_native``, and what became of it in words.

    They cannot be had without Linux, a compiler, or a build of torch with its own OpenMP library
    (two in one process would fight over the cores), or when the compilation fails.
    """
    if sys.platform != "linux":
        return None, f"not for {sys.platform}"
    openmp = next(iter(sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))), None)
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if openmp is None or compiler is None:
        return None, "no C++ compiler" if compiler is None else "torch has no OpenMP of its own"
    try:
        CDLL(str(openmp), mode=RTLD_GLOBAL)  # the library's own calls find torch's threads
        native = Native(_library(compiler, f"native-{_build_key(compiler)}.so"))
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        return None, f"{_FAILED}: {said[0] if said else error}"
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        return None, f"{_FAILED}: {error}"
    return native, "compiled" + (", bfloat16 for drafts" if native.has_half else "")


def _library(compiler: str, name: str) -> CDLL:
    file = cache_dir() / name
    if not file.is_file():
        try:
            _compile(compiler, file)
        except OSError:  # the folder cannot be written: for this process alone, then
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / name
                _compile(compiler, file)
                return CDLL(str(file))
    return CDLL(str(file))


def _build_key(compiler: str) -> str:
    """Changes with everything that the compiled code depends on."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=TIMEOUT_S, check=True
    )
    parts = [SOURCE.read_bytes(), version.stdout, repr((FLAGS, LIBRARIES)).encode()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = ("flags", "Features", "model name")
        parts += [next((x for x in lines if x.startswith(name)), "").encode() for name in names]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=file.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, str(SOURCE), "-o", name, *LIBRARIES]
        subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)
        os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)
