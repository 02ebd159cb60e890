#!/usr/bin/env bash
# Installs a CUDA 13.0 toolchain (nvcc, headers, link libraries) from the Python package registry, and prints the
# environment variables to use it:
#   eval "$(scripts/cuda-toolkit.sh)"
# It needs no GPU and no driver: programs link to a stub of libcuda that this script creates, and find the real library
# at run time on a machine with a driver.
# CUDA 13.0: PTX from a newer nvcc does not load on drivers of the 580 series.
set -euo pipefail
root="${S2O_CUDA_ROOT:-$HOME/.cache/s2o-cuda-13.0}"
py="${PYTHON:-python3}"
if [ ! -e "$root/.ready-2" ]; then
  mkdir -p "$root"
  "$py" -m venv "$root/venv" >&2
  "$root/venv/bin/pip" -q install --disable-pip-version-check \
    nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88 \
    'nvidia-curand<10.4.1' 'nvidia-cublas>=13.1,<13.2' nvidia-nccl-cu13 >&2
  site=$("$root/venv/bin/python" -c 'import sysconfig;print(sysconfig.get_paths()["purelib"])')
  nv="$site/nvidia/cu13"
  mkdir -p "$root/home/lib64/stubs"
  for d in bin include nvvm; do ln -sfn "$nv/$d" "$root/home/$d"; done
  # link-time names (libX.so) for what the wheels ship as libX.so.N
  for so in "$nv"/lib/*.so.* "$site"/nvidia/nccl/lib/*.so.*; do
    [ -e "$so" ] || continue
    b=$(basename "$so"); ln -sfn "$so" "$root/home/lib64/$b"; ln -sfn "$so" "$root/home/lib64/${b%%.so.*}.so"
  done
  for a in "$nv"/lib/*.a; do ln -sfn "$a" "$root/home/lib64/"; done
  ln -sfn "$root/home/lib64" "$root/home/lib"
  # stub libcuda.so: every driver entry point that a program may reference
  cat "$nv"/include/cuda*.h | grep -oE '\bcu[A-Z][A-Za-z0-9_]*\(' \
    | tr -d '(' | sort -u | sed 's/.*/void &(void){}/' > "$root/stub.c"
  # cuda.h renames some functions to _vN by macro: export both names
  cat "$nv"/include/cuda*.h | grep -oE '\bcu[A-Z][A-Za-z0-9]*_(v[0-9]+|ptsz|ptds)(_ptsz|_ptds)?\b' \
    | sort -u | sed 's/.*/void &(void){}/' >> "$root/stub.c"
  # older names that the driver still exports are listed in the typedefs
  grep -ohE '\bPFN_cu[A-Z][A-Za-z0-9]*' "$nv"/include/cudaTypedefs.h \
    | sort -u | sed 's/^PFN_\(.*\)/void \1(void){}/' >> "$root/stub.c"
  sort -u -o "$root/stub.c" "$root/stub.c"
  cc -w -shared -fPIC -nostdlib -Wl,-soname,libcuda.so.1 -o "$root/home/lib64/stubs/libcuda.so" "$root/stub.c"
  ln -sfn libcuda.so "$root/home/lib64/stubs/libcuda.so.1"
  touch "$root/.ready-2"
fi
h="$root/home"
cat <<EOF
export CUDA_HOME=$h CUDA_PATH=$h CUDA_ROOT=$h NVCC=$h/bin/nvcc PATH=$h/bin:\$PATH
export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-90} LIBRARY_PATH=$h/lib64:$h/lib64/stubs\${LIBRARY_PATH:+:\$LIBRARY_PATH}
EOF
