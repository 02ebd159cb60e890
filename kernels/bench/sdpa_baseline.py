"""The baselines of runner.cu: PyTorch's attention with its cuDNN and FlashAttention-2 backends, same shapes, bf16."""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa


def median_ms(f, runs):
    f(), f()
    times = []
    for _ in range(runs):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); f(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[runs // 2]


print(torch.__version__, torch.cuda.get_device_name(), "cudnn", torch.backends.cudnn.version())
for length, causal in [(8192, True), (32768, True), (65536, True), (131072, True), (16384, False)]:
    def heads(n):
        return torch.randn(1, length, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for kv_heads in (8, 32):
            q, k, v = heads(32), heads(kv_heads), heads(kv_heads)
            try:
                with sdpa_kernel(backend):
                    ms = median_ms(lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=kv_heads != 32),
                                   3 if length >= 131072 else 9)
            except RuntimeError as e:
                print(backend.name, length, kv_heads, "not run:", str(e).splitlines()[0][:80])
                continue
            flops = 4 * 128 * 32 * length * length / (2 if causal else 1)
            print(f"{backend.name:16} L={length:6} causal={causal} 32/{kv_heads:2} heads {ms:9.3f} ms {flops / ms * 1e-9:6.1f} TF/s")
            del q, k, v
