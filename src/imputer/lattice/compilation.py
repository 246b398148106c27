"""Compilation of loops with numba, and its cache. Without numba they run as plain Python.

Only the checks and the layout of runs (``arguments``, ``runs``, ``plan``) need to work without numba: the torch
implementation uses them. ``weights``, ``scores``, ``steps``, ``sums`` and ``paths`` are the compiled implementation.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

njit: Any = None
FunctionCache: Any = object
with suppress(ImportError):
    from numba import njit
    from numba.core.caching import FunctionCache

AVAILABLE = njit is not None


def part(**options: Any) -> Callable[..., Any]:
    """Decorator of a function that is inlined into compiled callers and owns no arrays."""
    if not AVAILABLE:
        return lambda function: function
    return njit(
        nogil=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, **options
    )


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a large part with one caller: numba copies it in, so that LLVM optimises it once, not per level."""
    return njit(inline="always")(function) if AVAILABLE else function


def allocator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function that makes arrays for compiled callers."""
    return njit(nogil=True)(function) if AVAILABLE else function


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function that Python calls: compiled once and cached on disk."""
    if not AVAILABLE:
        return function
    compiled = njit(nogil=True)(function)
    try:
        compiled._cache = _package_cache(Path(inspect.getfile(function)).parent)(function)
    except RuntimeError:  # no writable place for the cache: compile in every process
        return compiled
    return compiled


@functools.cache
def _announce() -> None:
    """Say once, to a person at a terminal, what the first call waits for."""
    if sys.stderr.isatty():
        print("imputer: compiling for this machine, once, in about 10 s ...", file=sys.stderr)


def _package_cache(folder: Path) -> type:
    """numba's cache, keyed by the sources of a package: numba itself checks only the function's own file."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    fingerprint = hashlib.sha256(sources).hexdigest()

    class PackageCache(FunctionCache):
        def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
            return (*super()._index_key(sig, codegen), fingerprint)

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            found = super().load_overload(sig, target_context)
            if found is None:
                _announce()
            return found

    return PackageCache
