"""safetensors files mapped into memory; the library's own reader copies."""

import json
import mmap
from pathlib import Path

import numpy as np

TYPES = {
    "U64": np.uint64,
    "I64": np.int64,
    "U32": np.uint32,
    "F32": np.float32,
    "U16": np.uint16,
    "U8": np.uint8,
}


def read(path: Path | str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and the tensors of a file; ValueError if it is not a safetensors file, or is cut off."""
    if not Path(path).stat().st_size:
        raise ValueError("the file is empty")
    with open(path, "rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    try:
        start = 8 + int(content[:8].view("<u8")[0])
        header = json.loads(content[8:start].tobytes())
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            first, end = (start + offset for offset in entry["data_offsets"])
            # The reshape fails where the file ends early.
            tensors[name] = content[first:end].view(TYPES[entry["dtype"]]).reshape(entry["shape"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a safetensors file: {error!r}") from error
    return metadata, tensors
