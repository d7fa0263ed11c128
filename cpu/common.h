// What the walks of all instruction sets share: headers, compiled for the machine that the build is
// for, and functions that are not worth more.
#pragma once

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

#include "core/affine.h"
#include "core/dtype.h"
#include "core/problem.h"
#include "cpu/kernel.h"
#include "cpu/walks.h"

#if defined(__GNUC__) && !defined(__clang__)
// Vectors are passed between inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"
// GCC 12 warns about its own _mm512_undefined_ps() and _mm512_undefined_epi32().
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

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
  if (p.da_out.data && !p.da_over_time && !p.da_over_runs()) each += byte_size(p.da_out.dtype);
  return each * p.channels() * p.time;
}

// Reading straight lines leaves a core time for other work. On Intel's (a Xeon: 9 GB/s a core)
// two blocks walked side by side take as long as one. On AMD's (30 GB/s) it is lines on their way
// to the first-level cache that take the time, wherever they come from.
inline bool reading_waits() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// Before others may read what was written past the caches.
inline void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace jax_scan::cpu
