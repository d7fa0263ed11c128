// Elementwise loops at the speed of the memory: the limit of a scan on a CPU. Arrays of floats,
// 1 to 3 of them read and 1 or 2 written, by several threads, with or without streaming stores.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kLine = 64;
constexpr size_t kBlock = 16;  // floats in a cache line

template <int R>
inline float sum(const float* const* in, size_t k) {
  float x = in[0][k];
  if constexpr (R > 1) x = x * 0.5f + in[1][k];
  if constexpr (R > 2) x = x * 0.5f + in[2][k];
  return x;
}

template <int R, int W, bool kStreaming>
void pass(const float* const* in, float* const* out, size_t begin, size_t end) {
#if defined(__AVX__)
  if constexpr (kStreaming) {
    const __m256 half = _mm256_set1_ps(0.5f);
    for (size_t k = begin; k < end; k += 8) {
      __m256 x = _mm256_load_ps(in[0] + k);
      for (int r = 1; r < R; ++r) {
        x = _mm256_add_ps(_mm256_mul_ps(x, half), _mm256_load_ps(in[r] + k));
      }
      _mm256_stream_ps(out[0] + k, x);
      if constexpr (W > 1) _mm256_stream_ps(out[1] + k, _mm256_sub_ps(x, half));
    }
    _mm_sfence();
    return;
  }
#endif
  float* __restrict__ first = out[0];
  float* __restrict__ second = out[W - 1];
  for (size_t k = begin; k < end; ++k) {
    const float x = sum<R>(in, k);
    first[k] = x;
    if constexpr (W > 1) second[k] = x - 0.5f;
  }
}

using Pass = void (*)(const float* const*, float* const*, size_t, size_t);

template <bool kStreaming>
Pass choose(int reads, int writes) {
  if (writes == 1) {
    if (reads == 1) return pass<1, 1, kStreaming>;
    if (reads == 2) return pass<2, 1, kStreaming>;
  }
  return pass<3, 2, kStreaming>;
}

struct Triad {
  Pass pass;
  std::vector<float*> arrays;
  const float* in[3] = {};
  float* out[2] = {};
  size_t size;
  int threads;
  std::vector<std::thread> helpers;
  std::atomic<int> round = 0, repeats = 0, working = 0;
  std::atomic<bool> stop = false;

  void part(int index, int count) {
    const size_t share = (size / kBlock + threads - 1) / threads * kBlock;
    const size_t begin = std::min(size, share * index), end = std::min(size, begin + share);
    for (int n = 0; n < count; ++n) pass(in, out, begin, end);
  }

  void help(int index) {
    for (int seen = 0;;) {
      // Waits actively for some tens of microseconds: waking up costs as much.
      for (int spin = 0; spin < 20000 && round.load() == seen; ++spin) {
      }
      round.wait(seen);
      seen = round.load();
      if (stop) return;
      part(index, repeats);
      --working;
    }
  }
};

}  // namespace

extern "C" {

void* triad_new(int reads, int writes, size_t size, int threads, int streaming) {
  auto* t = new Triad;
  t->pass = streaming ? choose<true>(reads, writes) : choose<false>(reads, writes);
  t->size = (size + kBlock - 1) / kBlock * kBlock;
  t->threads = threads;
  for (int k = 0; k < reads + writes; ++k) {
    auto* array = static_cast<float*>(std::aligned_alloc(kLine, t->size * sizeof(float)));
    for (size_t i = 0; i < t->size; ++i) array[i] = 1.0f;
    t->arrays.push_back(array);
    if (k < reads) {
      t->in[k] = array;
    } else {
      t->out[k - reads] = array;
    }
  }
  for (int k = 1; k < threads; ++k) t->helpers.emplace_back(&Triad::help, t, k);
  return t;
}

void triad_run(void* handle, int repeats) {
  auto* t = static_cast<Triad*>(handle);
  t->repeats = repeats;
  t->working = t->threads - 1;
  ++t->round;
  t->round.notify_all();
  t->part(0, repeats);
  while (t->working.load() != 0) {
  }
}

void triad_free(void* handle) {
  auto* t = static_cast<Triad*>(handle);
  t->stop = true;
  ++t->round;
  t->round.notify_all();
  for (std::thread& helper : t->helpers) helper.join();
  for (float* array : t->arrays) std::free(array);
  delete t;
}
}
