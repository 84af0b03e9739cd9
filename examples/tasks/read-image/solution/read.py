"""Reads digits of 5 x 7 blocks from an RGB image, whose rows have no filter."""

import struct
import sys
import zlib
from pathlib import Path

BLOCK = 12
MARGIN = 24
DIGITS = {
    "01110 10001 10011 10101 11001 10001 01110": "0",
    "00100 01100 00100 00100 00100 00100 01110": "1",
    "01110 10001 00001 00010 00100 01000 11111": "2",
    "11111 00010 00100 00010 00001 10001 01110": "3",
    "00010 00110 01010 10010 11111 00010 00010": "4",
    "11111 10000 11110 00001 00001 10001 01110": "5",
    "00110 01000 10000 11110 10001 10001 01110": "6",
    "11111 00001 00010 00100 01000 01000 01000": "7",
    "01110 10001 10001 01110 10001 10001 01110": "8",
    "01110 10001 10001 01111 00001 00010 01100": "9",
}

data = Path(sys.argv[1]).read_bytes()
width, height = struct.unpack(">II", data[16:24])
packed, place = b"", 8
while place < len(data):
    length, kind = struct.unpack(">I4s", data[place : place + 8])
    packed += data[place + 8 : place + 8 + length] if kind == b"IDAT" else b""
    place += 12 + length
rows = zlib.decompress(packed)
stride = 1 + 3 * width


def ink(column, row):
    """Whether the block is dark, by the green of the pixel in its middle."""
    x, y = MARGIN + column * BLOCK + BLOCK // 2, MARGIN + row * BLOCK + BLOCK // 2
    return "1" if rows[y * stride + 1 + 3 * x + 1] < 128 else "0"


for start in range(0, (width - 2 * MARGIN) // BLOCK, 6):
    print(DIGITS[" ".join("".join(ink(start + c, r) for c in range(5)) for r in range(7))], end="")
print()
