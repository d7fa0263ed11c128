#include "cpu/kernel.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <variant>

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
#include "cpu/rows.inc"
#include "cpu/steps.inc"
#include "cpu/walk.inc"
#include "cpu/chunks.inc"
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
#include "cpu/rows.inc"
#include "cpu/steps.inc"
#include "cpu/walk.inc"
#include "cpu/chunks.inc"
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
#include "cpu/rows.inc"
#include "cpu/steps.inc"
#include "cpu/walk.inc"
#include "cpu/chunks.inc"
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

// Lanes that fill the widest vectors. Below that, channels of several outer indices share a tile,
// or time is cut into chunks.
constexpr int64_t kLeastLanes = 16;
// Channels that fill no more than four of the widest vectors, which hold all that a step of
// so many needs: time is cut into blocks.
constexpr int64_t kFewBytes = 256;
// A call of fewer elements is done before a second thread has begun.
constexpr int64_t kSerialElements = 32768;

Blocks::Blocks(const Problem& p) {
  const int64_t size = byte_size(p.state);
  // Few neighbouring channels, or an odd number of them: chunks of time as lanes, two vectors or
  // more, in blocks that stay in the first-level cache.
  const bool odd = p.inner < 64 && p.inner * size % 64 != 0;
  if ((p.inner < kLeastLanes || odd) && p.time >= 16 * kLeastLanes) {
    chunks_ = p.inner == 1 ? 32 : 16;
    steps_ = std::max<int64_t>(16, 8192 / size / (chunks_ * p.inner) / 16 * 16);
  } else if (p.channels() * size <= kFewBytes && p.channels() * p.time >= kSerialElements) {
    steps_ = std::max<int64_t>(64, 65536 / size / p.channels() / 64 * 64);
  }
  int64_t t = 0;
  if (cut()) {
    full_ = p.time / (chunks_ * steps_);
    t = full_ * chunks_ * steps_;
  }
  // The rest: blocks of shorter chunks, and at last some single steps.
  while (t < p.time || rest_count_ + full_ == 0) {
    Block& block = rest_[rest_count_++];
    block = {t, chunks_, (p.time - t) / chunks_};
    if (block.chunks > 16 && block.steps * p.inner < 16) block = {t, 16, (p.time - t) / 16};
    if (block.chunks > 1 && block.steps * p.inner < 16) block = {t, 1, p.time - t};
    t = block.end();
  }
}

Block Blocks::operator[](int64_t index) const {
  if (index < full_) return {index * chunks_ * steps_, chunks_, steps_};
  return rest_[index - full_];
}

Tiling::Tiling(const Problem& p, int64_t threads) : blocks_(p) {
  if (blocks_.cut()) {
    inner_ = width_ = p.inner;
    groups_ = p.inner > 0 ? p.outer : 0;
    per_group_ = 1;
    count_ = groups_;
    if (threads > 1 && groups_ < 4 * threads && p.channels() * p.time >= kSerialElements) {
      const int64_t bytes = 2 * width_ * byte_size(p.state);
      values_ = std::make_unique<std::byte[]>(groups_ * bytes);
      handoffs_ = std::make_unique<Handoff[]>(groups_);
      for (int64_t g = 0; g < groups_; ++g) {
        handoffs_[g].set(&values_[g * bytes], &values_[g * bytes + bytes / 2]);
      }
      count_ = groups_ * blocks_.count();
    }
    return;
  }
  constexpr int64_t kNarrow = 256, kWide = 1024;
  inner_ = p.inner >= kLeastLanes ? p.inner : p.channels();
  groups_ = inner_ > 0 ? p.channels() / inner_ : 0;
  // Whole rows where that gives every thread something to do.
  const int64_t most = p.inner >= kLeastLanes ? kWide : kLeastLanes;
  width_ = std::min(inner_, most);
  const int64_t least = p.inner >= kLeastLanes ? kNarrow : kLeastLanes;
  while (width_ >= 2 * least && groups_ * ((inner_ + width_ - 1) / width_) < 2 * threads) {
    width_ /= 2;
  }
  per_group_ = inner_ > 0 ? (inner_ + width_ - 1) / width_ : 0;
  count_ = groups_ * per_group_;
}

Tile Tiling::tile(int64_t index) const {
  if (handoffs_) {
    const int64_t n = index / groups_, group = index % groups_;
    return {group * inner_, width_, n, n + 1, &handoffs_[group]};
  }
  const int64_t first = index % per_group_ * width_;
  return {index / per_group_ * inner_ + first, std::min(width_, inner_ - first), 0,
          blocks_.count(), nullptr};
}

bool run_tile(const Problem& problem, const Blocks& blocks, const Tile& tile, InstructionSet set) {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::kAvx2:
      return avx2::run(problem, blocks, tile);
    case InstructionSet::kAvx512:
      return avx512::run(problem, blocks, tile);
#endif
    default:
      return baseline::run(problem, blocks, tile);
  }
}

}  // namespace jax_scan::cpu
