"""SPHERE files as the LDC ships them, with a shorten encoder written from the format's description for the tests.

Shorten cuts the samples into blocks, predicts each sample from those before it, and writes the difference as a Rice
code: here the plain predictors of order 0 to 3, whichever makes a block smallest, and silent blocks.
"""

from pathlib import Path

import numpy as np

BLOCK = 256
DIFFERENCES, QUIT, ZERO, BLOCKSIZE = (0, 1, 2, 3), 4, 8, 5


class Bits:
    def __init__(self) -> None:
        self.bits: list[str] = []

    def unsigned(self, value: int, low: int) -> None:
        """The part above ``low`` bits in unary, then those bits."""
        self.bits.append(
            "0" * (value >> low) + "1" + (format(value & ((1 << low) - 1), f"0{low}b") if low else "")
        )

    def signed(self, value: int, low: int) -> None:
        self.unsigned(2 * value if value >= 0 else -2 * value - 1, low)

    def number(self, value: int) -> None:
        low = max(value.bit_length() - 1, 0)
        self.unsigned(low, 2)
        self.unsigned(value, low)

    def packed(self) -> bytes:
        joined = "".join(self.bits)
        joined += "0" * (-len(joined) % 32)
        return int(joined, 2).to_bytes(len(joined) // 8, "big")


def shorten(samples: np.ndarray) -> bytes:
    """16-bit samples of one channel, compressed without loss (version 2)."""
    bits = Bits()
    for value in (5, 1, BLOCK, 0, 0, 0):  # little-endian 16-bit, channels, block, no LPC, no mean, no skip
        bits.number(value)
    history = np.zeros(3, np.int64)
    for start in range(0, len(samples), BLOCK):
        block = samples[start : start + BLOCK].astype(np.int64)
        if len(block) < BLOCK:
            bits.unsigned(BLOCKSIZE, 2)
            bits.number(len(block))
        together = np.concatenate([history, block])
        if not block.any():
            bits.unsigned(ZERO, 2)
        else:
            residuals = [np.diff(together[3 - order :], order) for order in DIFFERENCES]
            order = min(DIFFERENCES, key=lambda o: int(np.abs(residuals[o]).sum()))
            low = max(1, int(np.abs(residuals[order]).mean()).bit_length())
            bits.unsigned(order, 2)
            bits.unsigned(low - 1, 3)
            for value in residuals[order].tolist():
                bits.signed(value, low)
        history = together[-3:]
    bits.unsigned(QUIT, 2)
    return b"ajkg\x02" + bits.packed()


def sphere(samples: np.ndarray, rate: int = 16000, *, compressed: bool = True) -> bytes:
    coding = "pcm,embedded-shorten-v2.00" if compressed else "pcm"
    fields = [
        "channel_count -i 1",
        f"sample_rate -i {rate}",
        f"sample_count -i {len(samples)}",
        "sample_n_bytes -i 2",
        "sample_byte_format -s2 01",
        "sample_sig_bits -i 16",
        f"sample_coding -s{len(coding)} {coding}",
        "end_head",
    ]
    header = "NIST_1A\n   1024\n" + "\n".join(fields) + "\n"
    data = shorten(samples) if compressed else samples.astype("<i2").tobytes()
    return header.encode().ljust(1024) + data


def write(path: Path, samples: np.ndarray, *, compressed: bool = True) -> None:
    """Write floating point samples as a .wv1 file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sphere(np.round(samples * 32767).astype(np.int64), compressed=compressed))
