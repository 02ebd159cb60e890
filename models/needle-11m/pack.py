#!/usr/bin/env python3
"""Convert weights to model.q8, the layout in this repository, and to a safetensors file.

    pack.py pack MASTER DIR      MASTER/master.*.safetensors (float32, from train.py) -> DIR/model.q8
    pack.py unpack DIR           DIR/model.q8 -> DIR/model.safetensors, which makes DIR a Hugging Face model directory

model.q8, all numbers little-endian:

    u64          length of the header
    header       that of the safetensors file: JSON with type, shape and data_offsets of each bf16 tensor
    bf16         all vectors (tensors of one dimension), in the order of their data_offsets
    f32          one scale per row of each matrix (tensors of two dimensions), in the same order
    i8           the values of each matrix, in the same order; from -63 to 63

A weight of a matrix is bf16(value * scale), computed in float32 and rounded to nearest even.
"""
import argparse, glob, gzip, json, os
import numpy as np
import torch
from safetensors.torch import load_file, save
from model import LEVELS


def tensors(file):
    """(header and its length, [(name, shape)] in the order of the data)"""
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:start])
    header.pop("__metadata__", None)
    order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return file[:start], [(name, item["shape"]) for name, item in order]


def pack(state):
    """float32 tensors -> the bytes of model.q8"""
    head, order = tensors(save({k: v.bfloat16() for k, v in state.items()}, metadata={"format": "pt"}))
    vectors, scales, values = [], [], []
    for name, shape in order:
        w = state[name].float()
        if len(shape) == 1:
            vectors.append(w.bfloat16().view(torch.int16).numpy().tobytes())
        else:
            scale = (w.abs().amax(-1, keepdim=True) / LEVELS).clamp(min=1e-12)
            scales.append(scale.numpy().tobytes())
            values.append((w / scale).round().to(torch.int8).numpy().tobytes())
    return head + b"".join(vectors + scales + values)


def unpack(packed):
    """the bytes of model.q8 -> bf16 tensors"""
    head, order = tensors(packed)
    at = len(head)
    matrices = [(n, s) for n, s in order if len(s) == 2]
    state = {}
    for name, shape in order:
        if len(shape) == 1:
            state[name] = torch.frombuffer(bytearray(packed[at:at + 2 * shape[0]]), dtype=torch.bfloat16)
            at += 2 * shape[0]
    scales = {}
    for name, (rows, _) in matrices:
        scales[name] = torch.from_numpy(np.frombuffer(packed, "<f4", rows, at).copy())
        at += 4 * rows
    for name, (rows, columns) in matrices:
        q = torch.from_numpy(np.frombuffer(packed, np.int8, rows * columns, at).reshape(rows, columns).copy())
        state[name] = (q.float() * scales[name][:, None]).bfloat16()
        at += rows * columns
    assert at == len(packed), (at, len(packed))
    return {name: state[name] for name, _ in order}


def read_master(path):
    state = {}
    for part in sorted(glob.glob(os.path.join(path, "master.*.safetensors"))):
        state |= load_file(part)
    return state


def load(path):
    """bf16 tensors of a folder: model.q8, model.safetensors, the model.planes of needle-7m, or master.* packed"""
    file = lambda name: os.path.join(path, name)
    if os.path.exists(file("model.q8")):
        return unpack(open(file("model.q8"), "rb").read())
    if os.path.exists(file("model.safetensors")):
        return load_file(file("model.safetensors"))
    if os.path.exists(file("model.planes")):
        planes = open(file("model.planes"), "rb").read()
        start = 8 + int.from_bytes(planes[:8], "little")
        high, low = np.frombuffer(planes, np.uint8, offset=start).reshape(2, -1).astype("<u2")
        rotated = (high << 8) | low
        from safetensors.torch import load as parse
        return parse(planes[:start] + ((rotated >> 1) | (rotated << 15)).astype("<u2").tobytes())
    return unpack(pack(read_master(path)))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("direction", choices=["pack", "unpack"])
    ap.add_argument("dirs", nargs="+")
    a = ap.parse_args()
    if a.direction == "unpack":
        state = load(a.dirs[0])
        with open(os.path.join(a.dirs[0], "model.safetensors"), "wb") as f:
            f.write(save(state, metadata={"format": "pt"}))
        return
    packed = pack(read_master(a.dirs[0]))
    with open(os.path.join(a.dirs[1], "model.q8"), "wb") as f:
        f.write(packed)
    print(f"{len(packed)} bytes, {len(gzip.compress(packed, 9))} after gzip -9")


if __name__ == "__main__":
    main()
