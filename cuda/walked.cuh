// The walk of one thread through all times of its channels: for short times, and for more channels
// than keep a GPU busy. The plainest of the kernels.
//
// A thread has V neighbouring channels, or one. It reads the operands of a few steps, so that they
// are on their way together, runs these steps, and writes. Nothing is shared between threads.
#pragma once

#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace jax_scan {

namespace walked {

// Steps that are read together. Of 16 bits half as many on 10.0, where more are spilled.
template <class B, int V>
inline constexpr int kSteps = (V == 1 ? 8 : 4) / (sizeof(B) == 2 && kMajor == 10 ? 2 : 1);

// An operand at V neighbouring channels, which may share it, from the walk's first step on.
template <class T, class S, int V>
class Stream {
 public:
  // Step s is at time at(s) - past.
  __device__ Stream(const Input& in, const Walk& walk, int64_t o, int64_t i, int past)
      : jump_(walk.step() * in.at.time_stride), apart_(in.at.inner_contiguous()) {
    const int64_t first = (walk.at(0) - past) * in.at.time_stride;
    data_ = static_cast<const T*>(in.data) + in.at.outer_offset(o) + in.at.inner_offset(i) + first;
  }

  // Steps k, k + 1, ..., of which there are `count`.
  template <int N>
  __device__ __forceinline__ void read(Pack<S, V> (&out)[N], int64_t k, int count) const {
    const T* from = data_ + k * jump_;
    if constexpr (V == 1) {
      S values[N] = {};
      load_run(values, from, jump_, count);
#pragma unroll
      for (int r = 0; r < N; ++r) out[r].v[0] = values[r];
    } else if (apart_) {
      Pack<T, V> packs[N] = {};
#pragma unroll
      for (int r = 0; r < N; ++r) {
        if (r < count) packs[r] = *reinterpret_cast<const Pack<T, V>*>(from + r * jump_);
      }
#pragma unroll
      for (int r = 0; r < N; ++r) {
#pragma unroll
        for (int v = 0; v < V; ++v) out[r].v[v] = load_as<S>(packs[r].v[v]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < N; ++r) {
        const S value = r < count ? load_as<S>(from[r * jump_]) : S(0);
#pragma unroll
        for (int v = 0; v < V; ++v) out[r].v[v] = value;
      }
    }
  }

 private:
  const T* data_;
  int64_t jump_;
  bool apart_;
};

template <class T, class S, int V, int N>
__device__ __forceinline__ void write(T* to, const Pack<S, V> (&packs)[N], int64_t jump,
                                      int count) {
  if constexpr (V == 1) {
    S values[N];
#pragma unroll
    for (int r = 0; r < N; ++r) values[r] = packs[r].v[0];
    store_run(values, to, jump, count);
  } else {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      Pack<T, V> pack;
#pragma unroll
      for (int v = 0; v < V; ++v) pack.v[v] = store_as<T>(packs[r].v[v]);
      if (r < count) *reinterpret_cast<Pack<T, V>*>(to + r * jump) = pack;
    }
  }
}

}  // namespace walked

template <Op kOp, class A, class B, int V>
__global__ void __launch_bounds__(kWalkedThreads) walked_kernel(const __grid_constant__ Problem p) {
  using namespace walked;
  using S = StateOf<B>;
  constexpr int N = kSteps<B, V>;
  constexpr bool kCotangent = kOp == Op::kCotangent;
  const uint32_t channel = (blockIdx.x * kWalkedThreads + threadIdx.x) * V;  // the first one
  if (channel >= p.channels()) return;
  const uint32_t inner = static_cast<uint32_t>(p.inner);
  const int64_t o = channel / inner, i = channel - o * inner;

  const Walk walk(p);
  const Stream<A, S, V> a(p.a, walk, o, i, 0);
  const Stream<B, S, V> x(p.x, walk, o, i, 0), h(p.h, walk, o, i, walk.past);
  const bool uses_h = kCotangent && p.da_out.data;
  const int64_t reset_jump = walk.step() * p.reset.at.time_stride;
  const uint8_t* reset = static_cast<const uint8_t*>(p.reset.data);
  if (reset) {
    reset += p.reset.at.outer_offset(o) + p.reset.at.inner_offset(i) +
             walk.at(0) * p.reset.at.time_stride;
  }
  const int64_t first = walk.first_step(kOp);
  const int64_t jump = walk.step() * p.inner;
  const int64_t begin = (o * p.time + walk.at(0)) * p.inner + i;

  Pack<S, V> s = {}, h0 = {}, sum = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (p.init.data) s.v[v] = load_one<S>(p.init, o, i + v, 0);
    if (uses_h && p.h0.data) h0.v[v] = load_one<S>(p.h0, o, i + v, 0);
  }
#pragma unroll 1
  for (int64_t k = 0; k < p.time; k += N) {
    const int count = static_cast<int>(min(int64_t{N}, p.time - k));
    Pack<S, V> as[N], xs[N], hs[kCotangent ? N : 1] = {};
    a.read(as, k, count);
    x.read(xs, k, count);
    if constexpr (kCotangent) {
      // Before the first step of h is h0, and no memory.
      if (uses_h) h.read(hs, k, static_cast<int>(min(int64_t{count}, first - k)));
    }
    Pack<S, V> ys[N], das[kCotangent ? N : 1];
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r >= count) continue;
      const bool is_first = k + r == first;
      const bool cut = (is_first && !p.has_h0) || (reset && reset[(k + r) * reset_jump]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Step<S> in{as[r].v[v], xs[r].v[v], S(0), cut};
        if constexpr (kCotangent) in.h = is_first ? h0.v[v] : hs[r].v[v];
        const Written<S> out = advance<kOp>(s.v[v], in);
        ys[r].v[v] = out.y;
        if constexpr (kCotangent) {
          das[r].v[v] = out.da_out;
          sum.v[v] = sum.v[v] + out.da_out;
        }
      }
    }
    const int64_t place = begin + k * jump;
    if (p.y.data) write(static_cast<B*>(p.y.data) + place, ys, jump, count);
    if constexpr (kCotangent) {
      if (uses_h && !p.da_over_time) {
        write(static_cast<A*>(p.da_out.data) + place, das, jump, count);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (p.final.data) store_one(p.final, channel + v, s.v[v]);
    if (uses_h && p.da_over_time) store_one(p.da_out, channel + v, sum.v[v]);
  }
}

template <class A, class B, int V>
cudaError_t launch_walked(const Problem& problem, cudaStream_t stream) {
  const int64_t threads = problem.channels() / V;
  const auto blocks = static_cast<unsigned>(divide_up(threads, kWalkedThreads));
  const auto kernel = problem.op == Op::kCotangent ? walked_kernel<Op::kCotangent, A, B, V>
                                                   : walked_kernel<Op::kScan, A, B, V>;
  kernel<<<blocks, kWalkedThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace jax_scan
