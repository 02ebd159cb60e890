#!/usr/bin/env python3
"""Convert model.safetensors to model.planes, the layout of the weights in this repository, and back.

    pack.py pack DIR      DIR/model.safetensors -> DIR/model.planes
    pack.py unpack DIR    DIR/model.planes -> DIR/model.safetensors

The header of the safetensors file stays as it is.  The bf16 words behind it are rotated left by one bit, which moves
the whole exponent into the high byte; all high bytes come first, then all low bytes.  gzip packs the exponents to 38 %
of their size and leaves the rest as it is, which brings the package below the 10 MiB that crates.io accepts.
"""
import argparse, os
import numpy as np


def data_start(file):
    """safetensors: a little-endian u64 with the length of the JSON header, the header, then the tensors"""
    return 8 + int.from_bytes(file[:8], "little")


def pack(safetensors):
    start = data_start(safetensors)
    words = np.frombuffer(safetensors, "<u2", offset=start)
    rotated = (words << 1) | (words >> 15)
    return safetensors[:start] + (rotated >> 8).astype(np.uint8).tobytes() + rotated.astype(np.uint8).tobytes()


def unpack(planes):
    start = data_start(planes)
    high, low = np.frombuffer(planes, np.uint8, offset=start).reshape(2, -1).astype("<u2")
    rotated = (high << 8) | low
    return planes[:start] + ((rotated >> 1) | (rotated << 15)).astype("<u2").tobytes()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("direction", choices=["pack", "unpack"])
    ap.add_argument("dir")
    a = ap.parse_args()
    files = [("model.safetensors", pack, unpack), ("model.planes", unpack, pack)]
    (source, convert, revert), (target, _, _) = files if a.direction == "pack" else files[::-1]
    with open(os.path.join(a.dir, source), "rb") as f:
        before = f.read()
    after = convert(before)
    if revert(after) != before:
        raise SystemExit(f"{source}: the conversion does not revert to the same bytes")
    with open(os.path.join(a.dir, target), "wb") as f:
        f.write(after)


if __name__ == "__main__":
    main()
