#include "cpu/kernel.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/dtype.h"
#include "core/problem.h"

namespace jax_scan::cpu {
namespace {

// This thread's buffers, kept from call to call. Null when there is no memory.
std::byte* scratch(size_t bytes) {
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  thread_local std::unique_ptr<std::byte, Free> memory;
  thread_local size_t size = 0;
  if (size < bytes) {
    memory.reset(
        static_cast<std::byte*>(::operator new(bytes, std::align_val_t(64), std::nothrow)));
    size = memory ? bytes : 0;
  }
  return memory.get();
}

// A call that moves more bytes than this finds nothing in the caches, and leaves nothing there.
constexpr int64_t kCacheBytes = int64_t{32} << 20;

int64_t bytes_moved(const Problem& p) {
  int64_t each = 0;
  for (const Input* input : {&p.a, &p.x, &p.da, &p.h}) {
    if (input->data && input->at.time_stride != 0) each += byte_size(input->dtype);
  }
  if (p.y.data) each += byte_size(p.y.dtype);
  if (p.da_out.data && !p.da_over_time) each += byte_size(p.da_out.dtype);
  return each * p.channels() * p.time;
}

// Before others may read what was written past the caches.
inline void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace

// The walk is compiled for several instruction sets; functions between BEGIN and END are compiled
// for the named features.
#define JAX_SCAN_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define JAX_SCAN_BEGIN_TARGET(features) \
  JAX_SCAN_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define JAX_SCAN_END_TARGET JAX_SCAN_PRAGMA(clang attribute pop)
#else
#define JAX_SCAN_BEGIN_TARGET(features) \
  JAX_SCAN_PRAGMA(GCC push_options) JAX_SCAN_PRAGMA(GCC target(features))
#define JAX_SCAN_END_TARGET JAX_SCAN_PRAGMA(GCC pop_options)
// Vectors are passed between inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"
// GCC 12 warns about its own _mm512_undefined_ps().
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define JAX_SCAN_VECTOR_BYTES 16
#define JAX_SCAN_F16C 0
namespace {
namespace baseline {
#include "cpu/simd.inc"
#include "cpu/tile.inc"
}  // namespace baseline
}  // namespace
#undef JAX_SCAN_INLINE
#undef JAX_SCAN_VECTOR_BYTES
#undef JAX_SCAN_F16C

#if defined(__x86_64__)
#define JAX_SCAN_VECTOR_BYTES 32
#define JAX_SCAN_F16C 1
JAX_SCAN_BEGIN_TARGET("avx2,f16c")
namespace {
namespace avx2 {
#include "cpu/simd.inc"
#include "cpu/tile.inc"
}  // namespace avx2
}  // namespace
JAX_SCAN_END_TARGET
#undef JAX_SCAN_INLINE
#undef JAX_SCAN_VECTOR_BYTES
#undef JAX_SCAN_F16C

#define JAX_SCAN_VECTOR_BYTES 64
#define JAX_SCAN_F16C 1
JAX_SCAN_BEGIN_TARGET("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace {
namespace avx512 {
#include "cpu/simd.inc"
#include "cpu/tile.inc"
}  // namespace avx512
}  // namespace
JAX_SCAN_END_TARGET
#undef JAX_SCAN_INLINE
#undef JAX_SCAN_VECTOR_BYTES
#undef JAX_SCAN_F16C
#endif

bool supported(InstructionSet set) {
  switch (set) {
    case InstructionSet::kBaseline:
      return true;
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case InstructionSet::kAvx512:
      return supported(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

InstructionSet best_instruction_set() {
  static const InstructionSet best = [] {
    for (const InstructionSet set : {InstructionSet::kAvx512, InstructionSet::kAvx2}) {
      if (supported(set)) return set;
    }
    return InstructionSet::kBaseline;
  }();
  return best;
}

Tiling::Tiling(const Problem& p, int64_t threads) {
  // Lanes that fill the widest vectors. Below that, channels of several outer indices share a tile.
  constexpr int64_t kLeast = 16;
  constexpr int64_t kNarrow = 256, kWide = 1024;
  inner_ = p.inner >= kLeast ? p.inner : p.channels();
  groups_ = inner_ > 0 ? p.channels() / inner_ : 0;
  // Whole rows where that gives every thread something to do.
  const int64_t most = p.inner >= kLeast ? kWide : kLeast;
  width_ = std::min(inner_, most);
  const int64_t least = p.inner >= kLeast ? kNarrow : kLeast;
  while (width_ >= 2 * least && groups_ * ((inner_ + width_ - 1) / width_) < 2 * threads) {
    width_ /= 2;
  }
  per_group_ = inner_ > 0 ? (inner_ + width_ - 1) / width_ : 0;
  count_ = groups_ * per_group_;
}

Tile Tiling::tile(int64_t index) const {
  const int64_t first = index % per_group_ * width_;
  return {index / per_group_ * inner_ + first, std::min(width_, inner_ - first)};
}

bool run_tile(const Problem& problem, const Tile& tile, InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return avx2::run(problem, tile);
    case InstructionSet::kAvx512:
      return avx512::run(problem, tile);
#endif
    default:
      return baseline::run(problem, tile);
  }
}

}  // namespace jax_scan::cpu
