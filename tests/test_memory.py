"""What the system has to do for tensors that are made and freed again at every step."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from imputer.support.memory import reuse_freed_memory

{call}
for step in range(12):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = torch.zeros(16_000_000) + step
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(call: str) -> int:
    found = subprocess.run([sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, check=True)
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no such choice")
def test_freed_memory_is_used_again() -> None:
    pages = 20 * 16_000_000 * 4 / 4096  # of the tensors of the last ten steps, two each
    # Where the heap happens to be fragmented it grows by a few tensors first.
    assert page_faults("reuse_freed_memory()") < pages / 2 < page_faults("")
