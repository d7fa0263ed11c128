// The scan for many channels: each thread walks the time of its own channel in order, and the block
// keeps a ring of stages of asynchronous 16-byte copies in flight ahead of it.
//
// A stage is a few rows of each operand in shared memory; a row is one time step of the block's
// channels, which are neighbours in memory. Two things decide the speed: the bytes in flight (a
// multiprocessor needs about 26 KB of them to draw its share of the memory's bandwidth), and that
// the block's warps read their parts of a row together (rows of 128 bytes read at different times
// cost a sixth of the bandwidth).
#pragma once

#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace jax_scan {

namespace sequential {

__device__ __forceinline__ void copy_16_bytes(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
  *static_cast<int4*>(shared) = *static_cast<const int4*>(global);
#endif
}

__device__ __forceinline__ void close_stage() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the newest kPending stages have arrived, and all threads are done with what
// they have read before.
template <int kPending>
__device__ __forceinline__ void wait_for_stage() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
  __syncthreads();
}

// One operand's way into shared memory: [warp][stage][step][lane]. The block's threads copy whole
// rows together; each reads its own column.
template <class T, int kSteps, int kStages>
class Stream {
 public:
  static constexpr int kRowBytes = 32 * static_cast<int>(sizeof(T));  // of one warp
  static constexpr int kStageBytes = kSteps * kRowBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;

  // The row of step s holds time at(s) - past.
  __device__ Stream(const Input& in, const Problem& p, const Walk& walk, int past, char* ring)
      : ring_(ring) {
    const int threads_per_row = static_cast<int>(blockDim.x) / kRowsPerCopy;
    const int column = threadIdx.x % threads_per_row * 16;  // in bytes
    row_ = threadIdx.x / threads_per_row;
    slot_ = column / kRowBytes * kRingBytes + row_ * kRowBytes + column % kRowBytes;
    // The last block's copies past the last channel read the last channels again.
    const int64_t channel =
        min(int64_t{blockIdx.x} * blockDim.x + column / sizeof(T), p.channels() - kVector<T>);
    const T* source = static_cast<const T*>(in.data) + in.at.outer_offset(channel / p.inner) +
                      in.at.inner_offset(channel % p.inner);
    if (!in.data || in.at.time_stride == 0) {
      fill(in.data ? *reinterpret_cast<const int4*>(source) : int4{0, 0, 0, 0});
      return;
    }
    // Steps whose time lies within the operand.
    begin_ = past == walk.step() ? 1 : 0;
    end_ = past == -walk.step() ? walk.time - 1 : walk.time;
    jump_ = walk.step() * in.at.time_stride * kRowsPerCopy * static_cast<int>(sizeof(T));
    next_ = reinterpret_cast<const char*>(source + (walk.at(row_) - past) * in.at.time_stride);
  }

  // Queues the copies of steps s0 ... s0 + kSteps - 1, as far as there are such steps. Called for
  // one stage after the other.
  __device__ __forceinline__ void fetch(int64_t s0, int stage) {
    char* to = ring_ + stage * kStageBytes + slot_;
    if (s0 >= begin_ && s0 + kSteps <= end_) {
#pragma unroll
      for (int k = 0; k < kCopies; ++k) {
        copy_16_bytes(to + k * kRowsPerCopy * kRowBytes, next_);
        next_ += jump_;
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < kCopies; ++k) {
        const int64_t s = s0 + row_ + k * kRowsPerCopy;
        if (s >= begin_ && s < end_) copy_16_bytes(to + k * kRowsPerCopy * kRowBytes, next_);
        next_ += jump_;
      }
    }
  }

  // This thread's element of a step.
  __device__ __forceinline__ T operator()(int stage, int step) const {
    const char* mine = ring_ + threadIdx.x / 32 * kRingBytes + threadIdx.x % 32 * sizeof(T);
    return *reinterpret_cast<const T*>(mine + stage * kStageBytes + step * kRowBytes);
  }

 private:
  static constexpr int kRowsPerCopy = 32 * 16 / kRowBytes;  // by all threads, whatever their number
  static constexpr int kCopies = kSteps / kRowsPerCopy;
  static_assert(kSteps % kRowsPerCopy == 0);

  // An operand without time, or an absent one, fills its ring once.
  __device__ void fill(int4 value) const {
    for (int k = 0; k < kStages * kCopies; ++k) {
      *reinterpret_cast<int4*>(ring_ + slot_ + k * kRowsPerCopy * kRowBytes) = value;
    }
  }

  char* ring_;
  const char* next_ = nullptr;
  int64_t jump_ = 0;
  int64_t begin_ = 0;
  int64_t end_ = 0;  // 0: nothing to copy
  int row_;
  int slot_;
};

// Stands in for an operand that an operation does not have.
template <class T>
class NoStream {
 public:
  static constexpr int kRingBytes = 0;
  __device__ NoStream(const Input&, const Problem&, const Walk&, int, char*) {}
  __device__ __forceinline__ void fetch(int64_t, int) {}
  __device__ __forceinline__ T operator()(int, int) const { return {}; }
};

// The streams of an operation on a of type A, b of type B and h of type H.
template <Op kOp, class A, class B, class H>
struct Streams {
  static constexpr StreamTypes kTypes{kDType<A>, kDType<B>, kDType<H>};
  static constexpr int kSteps = stage_steps(kOp, kTypes);
  static constexpr int kStages = ring_stages(kOp);
  template <bool kPresent, class T>
  using StreamIf = std::conditional_t<kPresent, Stream<T, kSteps, kStages>, NoStream<T>>;

  using X = std::conditional_t<kOp == Op::kCotangent, H, B>;
  using Y = std::conditional_t<kOp == Op::kCotangent, B, H>;
  using AStream = Stream<A, kSteps, kStages>;
  using XStream = Stream<X, kSteps, kStages>;
  using DaStream = StreamIf<kOp == Op::kTangent, A>;
  using HStream = StreamIf<kOp != Op::kScan, H>;
  static constexpr int kRingBytes = ring_bytes(kOp, kTypes);
  static_assert(kRingBytes == AStream::kRingBytes + XStream::kRingBytes + DaStream::kRingBytes +
                                  HStream::kRingBytes);
};

}  // namespace sequential

template <Op kOp, class A, class B, class H>
__global__ void __launch_bounds__(128,
                                  1)  // shared memory has room for few blocks: spend the registers
    sequential_kernel(const __grid_constant__ Problem p) {
  using namespace sequential;
  using Of = Streams<kOp, A, B, H>;
  using Y = typename Of::Y;
  using S = StateOf<B>;
  constexpr int kSteps = Of::kSteps, kStages = Of::kStages;
  constexpr unsigned kAll = 0xffffffffu;
  extern __shared__ __align__(16) char shared[];

  const Walk walk(p);
  const int64_t channel = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool valid = channel < p.channels();
  // Threads past the last channel walk it again and write nothing.
  const int64_t o = (valid ? channel : p.channels() - 1) / p.inner;
  const int64_t i = (valid ? channel : p.channels() - 1) % p.inner;

  // The streams' rings lie one behind the other.
  const int warps = blockDim.x / 32;
  char* ring = shared;
  typename Of::AStream a_stream(p.a, p, walk, 0, ring);
  ring += warps * Of::AStream::kRingBytes;
  typename Of::XStream x_stream(p.x, p, walk, 0, ring);
  ring += warps * Of::XStream::kRingBytes;
  typename Of::DaStream da_stream(p.da, p, walk, 0, ring);
  ring += warps * Of::DaStream::kRingBytes;
  typename Of::HStream h_stream(p.h, p, walk, walk.past, ring);

  const auto fetch = [&](int64_t s0, int stage) {
    a_stream.fetch(s0, stage);
    x_stream.fetch(s0, stage);
    da_stream.fetch(s0, stage);
    h_stream.fetch(s0, stage);
    close_stage();
  };
#pragma unroll 1
  for (int k = 0; k < kStages - 1; ++k) fetch(k * kSteps, k);

  S s = p.init.data ? load_one<S>(p.init, o, i, 0) : S(0);
  const S h0 = kOp != Op::kScan && p.h0.data ? load_one<S>(p.h0, o, i, 0) : S(0);
  S da_sum = S(0), stage_sum = S(0);  // of all stages before, and of this one
  // The first step of h's recurrence, where h_prev is h0 and, without h0, the past is cut off.
  const int64_t first = walk.first_step(kOp);

  // Bit r: step s0 + r of this thread is cut. Where a warp's threads share their resets, each reads
  // one step's.
  const uint8_t* const reset =
      p.reset.data ? static_cast<const uint8_t*>(p.reset.data) + p.reset.at.outer_offset(o)
                   : nullptr;
  int one_outer;
  __match_all_sync(kAll, o, &one_outer);
  const auto cuts_of = [&](int64_t s0) {
    uint32_t bits = 0;
    if (reset && one_outer) {
      const int lane = threadIdx.x % 32;
      const int64_t mine = s0 + lane;
      bits = __ballot_sync(
          kAll, lane < kSteps && mine < p.time && reset[walk.at(mine) * p.reset.at.time_stride]);
    } else if (reset) {
#pragma unroll 1
      for (int r = 0; r < kSteps && s0 + r < p.time; ++r) {
        if (reset[walk.at(s0 + r) * p.reset.at.time_stride]) bits |= 1u << r;
      }
    }
    if (!p.has_h0 && first >= s0 && first < s0 + kSteps) bits |= 1u << (first - s0);
    return bits;
  };

  const int64_t offset = (o * p.time + walk.at(0)) * p.inner + i;
  const int64_t y_step = walk.step() * p.inner;
  Y* y = static_cast<Y*>(p.y.data) + offset;
  A* da_out = static_cast<A*>(p.da_out.data) + offset;
  const bool write_y = valid && p.y.data;
  const bool write_da = valid && p.da_out.data && !p.da_over_time;

  const auto one_step = [&](int stage, int r, bool cut, bool at_first) {
    Step<S> in{load_as<S>(a_stream(stage, r)), load_as<S>(x_stream(stage, r)), S(0), cut};
    if constexpr (kOp != Op::kScan) in.h = at_first ? h0 : load_as<S>(h_stream(stage, r));
    if constexpr (kOp == Op::kTangent) {
      if (!cut) in.x = mul_add(load_as<S>(da_stream(stage, r)), in.h, in.x);
    }
    const Written<S> out = advance<kOp>(s, in);
    if (write_y) *y = store_as<Y>(out.y);
    y += y_step;
    if constexpr (kOp == Op::kCotangent) {
      if (write_da) *da_out = store_as<A>(out.da_out);
      da_out += y_step;
      stage_sum = stage_sum + out.da_out;
    }
  };

  int stage = 0;
  uint32_t cuts = cuts_of(0);
  for (int64_t s0 = 0; s0 < p.time; s0 += kSteps) {
    wait_for_stage<kStages - 2>();
    // The slot that the last round has read is free again.
    fetch(s0 + (kStages - 1) * kSteps, stage == 0 ? kStages - 1 : stage - 1);
    const uint32_t next_cuts = cuts_of(s0 + kSteps);
    const bool plain = s0 + kSteps <= p.time && (first < s0 || first >= s0 + kSteps);
    if (__all_sync(kAll, plain && cuts == 0)) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) one_step(stage, r, false, false);
    } else {
      const int steps = static_cast<int>(min(p.time - s0, int64_t{kSteps}));
#pragma unroll 4
      for (int r = 0; r < steps; ++r) {
        one_step(stage, r, ((cuts >> r) & 1u) != 0, s0 + r == first);
      }
    }
    da_sum = da_sum + stage_sum;
    stage_sum = S(0);
    cuts = next_cuts;
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  if (!valid) return;
  if (p.final.data) store_one(p.final, channel, s);
  if (kOp == Op::kCotangent && p.da_out.data && p.da_over_time) {
    store_one(p.da_out, channel, da_sum);
  }
}

namespace sequential {

template <Op kOp, class A, class B, class H>
cudaError_t launch_op(const Problem& problem, SequentialPlan plan, cudaStream_t stream) {
  const auto kernel = sequential_kernel<kOp, A, B, H>;
  const int bytes = plan.warps * Streams<kOp, A, B, H>::kRingBytes;
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (raised != cudaSuccess) return raised;
  kernel<<<dim3(static_cast<unsigned>(plan.blocks)), 32 * plan.warps, bytes, stream>>>(problem);
  return cudaGetLastError();
}

}  // namespace sequential

template <class A, class B, class H>
cudaError_t launch_sequential(const Problem& problem, SequentialPlan plan, cudaStream_t stream) {
  switch (problem.op) {
    case Op::kTangent:
      return sequential::launch_op<Op::kTangent, A, B, H>(problem, plan, stream);
    case Op::kCotangent:
      return sequential::launch_op<Op::kCotangent, A, B, H>(problem, plan, stream);
    case Op::kScan:
      break;
  }
  return sequential::launch_op<Op::kScan, A, B, H>(problem, plan, stream);
}

}  // namespace jax_scan
