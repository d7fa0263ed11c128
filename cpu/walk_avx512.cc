// The walk of a tile, compiled for AVX-512. Headers come first: what is compiled after them may run
// only where kernel.cc has found these instructions.
#if defined(__x86_64__)
#include "cpu/common.h"

#define JAX_SCAN_VECTOR_BYTES 64
#define JAX_SCAN_F16C 1
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace jax_scan::cpu {
namespace {
#include "cpu/simd.inc"
//
#include "cpu/rows.inc"
//
#include "cpu/steps.inc"
//
#include "cpu/lines.inc"
//
#include "cpu/walk.inc"
//
#include "cpu/chunks.inc"
//
#include "cpu/turns.inc"
//
#include "cpu/tile.inc"
}  // namespace

bool run_avx512(const Problem& problem, const Blocks& blocks, const Tile& tile) {
  return run(problem, blocks, tile);
}

}  // namespace jax_scan::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // defined(__x86_64__)
