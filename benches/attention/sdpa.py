"""Prints the median milliseconds of PyTorch's cuDNN attention on bf16 tensors q, k, v (len, heads, head_dim) in a folder.
Arguments: folder len heads kv_heads head_dim repeats scale causal"""
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

folder = Path(sys.argv[1])
length, heads, kv_heads, head_dim, repeats = map(int, sys.argv[2:7])
scale, causal = float(sys.argv[7]), sys.argv[8] == "1"


def load(name, count):
    data = torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.bfloat16)
    return data.cuda().view(1, length, count, head_dim).transpose(1, 2)


q, k, v = load("q", heads), load("k", kv_heads), load("v", kv_heads)
times = []
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    for turn in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads)
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end))
print(sorted(times)[len(times) // 2])
