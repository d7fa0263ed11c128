// The scan for many channels: each channel's steps are taken in order, one thread at a time.
//
// A block owns a few neighbouring channels and walks their time in stages of a few steps. Teams of
// warps, each with a lane for every channel, take the stages in turn. A team
//   1. waits for its stage, which asynchronous 16-byte copies have brought to shared memory,
//   2. reads it into registers and orders a later stage's copies to the place that it has left,
//   3. waits for the state that the team before it hands over,
//   4. takes the steps, which is all that can't overlap with the other teams' work,
//   5. hands the state on, then writes its results.
// So the memory sees whole rows (a row is one step of the block's channels) asked for far ahead,
// and the chain of dependent steps shares its time with nothing else.
#pragma once

#include <type_traits>

#include "cuda/copy.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace jax_scan {

namespace sequential {

__device__ __forceinline__ void close_stage() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but this thread's newest `pending` stages have arrived.
__device__ __forceinline__ void wait_for_stage(int pending) {
#if __CUDA_ARCH__ >= 800
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    case 4:
      asm volatile("cp.async.wait_group 4;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 5;" ::: "memory");
      break;
  }
#endif
}

// Hides from the compiler where a stride comes from. It would otherwise compute strides anew in
// each round of a loop, and keep their multiples in registers instead.
__device__ __forceinline__ int64_t opaque(int64_t stride) {
  asm volatile("" : "+l"(stride));
  return stride;
}

inline constexpr unsigned kAllLanes = 0xffffffffu;

template <class S>
__device__ __forceinline__ S from_lane(S value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
template <class R>
__device__ __forceinline__ Complex<R> from_lane(Complex<R> value, int lane) {
  return {from_lane(value.re, lane), from_lane(value.im, lane)};
}

// A barrier of some of the block's warps. arrive() announces and goes on; what was written before
// it is seen behind the wait() that it completes.
class Barrier {
 public:
  __device__ Barrier(int id, int threads) : id_(id), threads_(threads) {}
  __device__ __forceinline__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(id_), "r"(threads_) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(id_), "r"(threads_) : "memory");
  }

 private:
  int id_;
  int threads_;
};

// Where a thread stands in its block: warps lie [team][group], a group being 32 channels.
struct Place {
  int groups;
  int team;
  int group;
  int lane;
  int first_channel;  // of the block
  __device__ explicit Place(const SequentialPlan& plan)
      : groups(plan.groups),
        team(static_cast<int>(threadIdx.x) / 32 / plan.groups),
        group(static_cast<int>(threadIdx.x) / 32 % plan.groups),
        lane(static_cast<int>(threadIdx.x) % 32),
        first_channel(static_cast<int>(blockIdx.x) * plan.groups * 32) {}
  __device__ int column() const { return group * 32 + lane; }
};

// A channel's indices.
struct Channel {
  int o;
  int i;
  __device__ Channel(int channel, const Problem& p)
      : o(static_cast<int>(static_cast<uint32_t>(channel) / static_cast<uint32_t>(p.inner))),
        i(channel - o * static_cast<int>(p.inner)) {}
};

// The steps of a stage that exist: begin ... end - 1. The end may lie outside the stage on either
// side.
struct Span {
  int begin;
  int end;
  __device__ bool contains(int step) const { return step >= begin && step < end; }
};

// One operand's way into a team's registers, the same for a warp's threads. An operand without time
// is read once. One whose rows lie in 16-byte pieces passes through a ring in shared memory,
// [slot][group][step][lane], where the team copies whole rows together. Of one that is the same for
// a warp's channels, each lane loads one step's element, a turn ahead. Of any other, each thread
// loads its own elements when they are needed. (Copying element by element ahead of time is
// slower.)
template <class T, class S, int kSteps>
class Stream {
 public:
  static constexpr int kRowBytes = 32 * static_cast<int>(sizeof(T));  // of one group
  static constexpr int kGroupBytes = kSteps * kRowBytes;

  // The row of step s holds time at(s) - past.
  __device__ Stream(const Input& in, bool in_pieces, const Problem& p, const SequentialPlan& plan,
                    const Walk& walk, const Place& place, int past, int channel, char* ring)
      : mine_(ring + place.group * kGroupBytes + place.lane * static_cast<int>(sizeof(T))),
        to_(mine_) {
    int step = place.team * kSteps;
    if (!in.data || in.at.time_stride == 0) {
      way_ = Way::kFixed;
    } else if (!in_pieces) {
      way_ = Way::kDirect;
    } else {
      way_ = Way::kRing;
      const int pieces = place.groups * kRowBytes / 16;  // of a row
      const int thread = static_cast<int>(threadIdx.x) - place.team * place.groups * 32;
      const int column = thread % pieces * 16;  // in bytes
      row_ = thread / pieces;
      step += row_;
      to_ = ring + column / kRowBytes * kGroupBytes + row_ * kRowBytes + column % kRowBytes;
      // The last block's copies past the last channel read the last channels again.
      channel = min(place.first_channel + column / static_cast<int>(sizeof(T)),
                    static_cast<int>(p.channels()) - kVector<T>);
    }
    stride_ = opaque(walk.step() * in.at.time_stride * static_cast<int>(sizeof(T)));
    turn_ = opaque(stride_ * plan.teams * kSteps);
    const Channel at(channel, p);
    const T* source =
        static_cast<const T*>(in.data) + in.at.outer_offset(at.o) + in.at.inner_offset(at.i);
    if (way_ == Way::kFixed) {
      if (in.data) value_ = load_as<S>(*source);
    } else {
      source += (walk.at(step) - past) * in.at.time_stride;
    }
    from_ = reinterpret_cast<const char*>(source);
    if (way_ == Way::kDirect) {
      int same;
      __match_all_sync(kAllLanes, reinterpret_cast<uint64_t>(from_), &same);
      if (same != 0) {
        way_ = Way::kByWarp;
        from_ += place.lane * stride_;
      }
    }
  }

  // Loads what is loaded a turn ahead; `there` are the steps of the team's next stage that exist.
  __device__ __forceinline__ void load_ahead(Span there) {
    if (way_ != Way::kByWarp) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kSteps && there.contains(lane)) {
      value_ = load_as<S>(*reinterpret_cast<const T*>(from_));
    }
    from_ += turn_;
  }

  // Orders the copies of the team's next stage, as far as it exists.
  __device__ __forceinline__ void fetch(Span there, int slot) {
    if (way_ != Way::kRing) return;
    const char* from = from_;
    from_ += turn_;
    char* to = to_ + slot * kGroupBytes;
    const int64_t jump = opaque(stride_) * kRowsPerCopy;
    if (there.begin == 0 && there.end >= kSteps) {
#pragma unroll
      for (int k = 0; k < kCopies; ++k) {
        copy_async<16>(to + k * kRowsPerCopy * kRowBytes, from);
        from += jump;
      }
    } else {
#pragma unroll 1
      for (int row = row_; row < kSteps; row += kRowsPerCopy) {
        if (there.contains(row)) copy_async<16>(to, from);
        from += jump;
        to += kRowsPerCopy * kRowBytes;
      }
    }
  }

  // This thread's elements of the team's stage; where there is no such step, anything.
  __device__ __forceinline__ void read(S (&out)[kSteps], Span there, int slot) {
    if (way_ == Way::kRing) {
      const char* mine = mine_ + slot * kGroupBytes;
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        out[r] = load_as<S>(*reinterpret_cast<const T*>(mine + r * kRowBytes));
      }
    } else if (way_ == Way::kFixed) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) out[r] = value_;
    } else if (way_ == Way::kByWarp) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) out[r] = from_lane(value_, r);
    } else {
      const char* from = from_;
      from_ += turn_;
      const int64_t stride = opaque(stride_);
      T elements[kSteps];  // all loads first, then the conversions that wait for them
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        elements[r] = T{};
        if (there.contains(r)) elements[r] = *reinterpret_cast<const T*>(from);
        from += stride;
      }
#pragma unroll
      for (int r = 0; r < kSteps; ++r) out[r] = load_as<S>(elements[r]);
    }
  }

 private:
  enum class Way { kFixed, kRing, kByWarp, kDirect };
  // Rows that a team copies at once, whatever its size.
  static constexpr int kRowsPerCopy = 32 * 16 / kRowBytes;
  static constexpr int kCopies = kSteps / kRowsPerCopy;
  static_assert(kSteps % kRowsPerCopy == 0);

  Way way_;
  int row_ = 0;     // the first that this thread copies
  int64_t stride_;  // from step to step, in bytes
  int64_t turn_;    // from a team's stage to its next
  const char* from_;
  char* mine_;      // what this thread reads
  char* to_;        // where it copies to
  S value_ = S(0);  // of every step, or of this lane's
};

// Stands in for an operand that an operation does not have.
template <class S, int kSteps>
class NoStream {
 public:
  static constexpr int kGroupBytes = 0;
  template <class... Args>
  __device__ explicit NoStream(const Args&...) {}
  __device__ __forceinline__ void load_ahead(Span) const {}
  __device__ __forceinline__ void fetch(Span, int) const {}
  __device__ __forceinline__ void read(S (&)[kSteps], Span, int) const {}
};

// Writes a stage's steps that exist, the r-th to out[r * stride].
template <class T, class S, int kSteps>
__device__ __forceinline__ void write(T* out, int64_t stride, const S (&values)[kSteps],
                                      Span there) {
  stride = opaque(stride);
  if (there.end >= kSteps) {
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      *out = store_as<T>(values[r]);
      out += stride;
    }
  } else {
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      if (r < there.end) *out = store_as<T>(values[r]);
      out += stride;
    }
  }
}

// The streams of an operation on a of type A, b of type B and h of type H.
template <Op kOp, class A, class B, class H>
struct Streams {
  using S = StateOf<B>;
  static constexpr StreamTypes kTypes{kDType<A>, kDType<B>, kDType<H>};
  static constexpr int kSteps = stage_steps(kOp, kTypes);
  template <bool kPresent, class T>
  using StreamIf = std::conditional_t<kPresent, Stream<T, S, kSteps>, NoStream<S, kSteps>>;

  using X = std::conditional_t<kOp == Op::kCotangent, H, B>;
  using Y = std::conditional_t<kOp == Op::kCotangent, B, H>;
  using AStream = Stream<A, S, kSteps>;
  using XStream = Stream<X, S, kSteps>;
  using DaStream = StreamIf<kOp == Op::kTangent, A>;
  using HStream = StreamIf<kOp != Op::kScan, H>;
  static constexpr int kStageBytes =
      AStream::kGroupBytes + XStream::kGroupBytes + DaStream::kGroupBytes + HStream::kGroupBytes;
  static_assert(kStageBytes == stage_bytes(kOp, kTypes));
};

}  // namespace sequential

template <Op kOp, class A, class B, class H>
__global__ void __launch_bounds__(32 * kMaxSequentialWarps, 1)
    sequential_kernel(const __grid_constant__ Problem p,
                      const __grid_constant__ SequentialPlan plan) {
  using namespace sequential;
  using Of = Streams<kOp, A, B, H>;
  using Y = typename Of::Y;
  using S = typename Of::S;
  constexpr int kSteps = Of::kSteps;
  extern __shared__ __align__(16) char shared[];

  const Walk walk(p);
  const Place place(plan);
  const int time = static_cast<int>(p.time);
  // Threads without a channel walk the last one again and write nothing.
  const int channel = min(place.first_channel + place.column(), static_cast<int>(p.channels()) - 1);
  const bool valid = channel == place.first_channel + place.column();

  // Behind the hand-over, a state for each column, lie the rings, [team][operand].
  S* const handed_over = reinterpret_cast<S*>(shared) + place.column();
  char* ring = shared + place.groups * 32 * kHandOverBytes +
               place.team * place.groups * plan.slots * Of::kStageBytes;
  const auto next_ring = [&](int group_bytes) {
    char* const mine = ring;
    ring += place.groups * plan.slots * group_bytes;
    return mine;
  };
  typename Of::AStream a_stream(p.a, plan.a_in_pieces, p, plan, walk, place, 0, channel,
                                next_ring(Of::AStream::kGroupBytes));
  typename Of::XStream x_stream(p.x, plan.x_in_pieces, p, plan, walk, place, 0, channel,
                                next_ring(Of::XStream::kGroupBytes));
  typename Of::DaStream da_stream(p.da, plan.da_in_pieces, p, plan, walk, place, 0, channel,
                                  next_ring(Of::DaStream::kGroupBytes));
  typename Of::HStream h_stream(p.h, plan.h_in_pieces, p, plan, walk, place, walk.past, channel,
                                next_ring(Of::HStream::kGroupBytes));

  // The stage's steps that exist, and those whose h_prev is in h.
  const auto steps_from = [&](int s0) { return Span{0, time - s0}; };
  const auto h_steps = [&](int s0) {
    return kOp == Op::kTangent ? Span{s0 == 0 ? 1 : 0, time - s0} : Span{0, time - 1 - s0};
  };
  const auto fetch = [&](int s0, int slot) {
    a_stream.fetch(steps_from(s0), slot);
    x_stream.fetch(steps_from(s0), slot);
    da_stream.fetch(steps_from(s0), slot);
    h_stream.fetch(h_steps(s0), slot);
    close_stage();
  };

  const auto load_ahead = [&](int s0) {
    a_stream.load_ahead(steps_from(s0));
    x_stream.load_ahead(steps_from(s0));
    da_stream.load_ahead(steps_from(s0));
    h_stream.load_ahead(h_steps(s0));
  };

  const int turn = plan.teams * kSteps;  // steps from a team's stage to its next
  const int slots = plan.slots * place.groups;
#pragma unroll 1
  for (int k = 0; k < plan.slots; ++k) {
    fetch(place.team * kSteps + k * turn, k * place.groups);
  }

  load_ahead(place.team * kSteps);

  const Barrier within_team(1 + place.team, 32 * place.groups);
  const int next_team = place.team + 1 == plan.teams ? 0 : place.team + 1;
  const Barrier from_last_team(1 + plan.teams + place.team, 64 * place.groups);
  const Barrier to_next_team(1 + plan.teams + next_team, 64 * place.groups);
  if (place.team == 0) {
    const Channel at(channel, p);
    *handed_over = p.init.data ? load_one<S>(p.init, at.o, at.i, 0) : S(0);
  }

  // Resets. Where a warp's threads share them, each loads one step's, a turn ahead.
  const uint8_t* reset = static_cast<const uint8_t*>(p.reset.data);
  const int64_t reset_stride = walk.step() * p.reset.at.time_stride;
  bool by_warp = false;
  if (reset) {
    const Channel at(channel, p);
    reset += p.reset.at.outer_offset(at.o) + p.reset.at.inner_offset(at.i) +
             walk.at(0) * p.reset.at.time_stride;
    int same;
    __match_all_sync(kAllLanes, reinterpret_cast<uint64_t>(reset), &same);
    by_warp = same != 0;
  }
  const auto lanes_reset = [&](int s0) -> uint8_t {
    const int s = s0 + place.lane;
    return by_warp && place.lane < kSteps && s < time ? reset[s * reset_stride] : 0;
  };
  uint8_t my_reset = lanes_reset(place.team * kSteps);

  const int64_t y_stride = opaque(walk.step() * p.inner);
  const Channel at_out(channel, p);
  const int64_t offset = (at_out.o * p.time + walk.at(0)) * p.inner + at_out.i;
  S da_sum = S(0);

  int slot = 0;
#pragma unroll 1
  for (int s0 = place.team * kSteps; s0 < time; s0 += turn) {
    const Span there = steps_from(s0);
    const bool whole = there.end >= kSteps;
    // The first step of h's recurrence, where h_prev is h0 and, without h0, the past is cut off.
    const int first = static_cast<int>(walk.first_step(kOp)) - s0;
    const bool has_first = first >= 0 && first < kSteps;

    // Bit r: step s0 + r of this thread is cut.
    uint32_t cuts = 0;
    if (by_warp) {
      cuts = __ballot_sync(kAllLanes, my_reset != 0);
      my_reset = lanes_reset(s0 + turn);
    } else if (reset) {
      const int64_t stride = opaque(reset_stride);
      const uint8_t* at = reset + s0 * stride;
      uint8_t resets[kSteps];
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        resets[r] = 0;
        if (r < there.end) resets[r] = *at;
        at += stride;
      }
#pragma unroll
      for (int r = 0; r < kSteps; ++r) cuts |= (resets[r] != 0 ? 1u : 0u) << r;
    }
    if (has_first && !p.has_h0) cuts |= 1u << first;

    wait_for_stage(plan.slots - 1);
    within_team.wait();
    S a[kSteps], x[kSteps], da[kSteps], h[kSteps];
    a_stream.read(a, there, slot);
    x_stream.read(x, there, slot);
    da_stream.read(da, there, slot);
    h_stream.read(h, h_steps(s0), slot);
    within_team.wait();
    fetch(s0 + plan.slots * turn, slot);
    load_ahead(s0 + turn);
    slot = slot + place.groups == slots ? 0 : slot + place.groups;

    if (kOp != Op::kScan && has_first) {
      const Channel at(channel, p);
      const S h0 = p.h0.data ? load_one<S>(p.h0, at.o, at.i, 0) : S(0);
#pragma unroll
      for (int r = 0; r < kSteps; ++r) h[r] = r == first ? h0 : h[r];
    }
    if constexpr (kOp == Op::kTangent) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        x[r] = (cuts >> r & 1u) != 0 ? x[r] : mul_add(da[r], h[r], x[r]);
      }
    }

    if (s0 > 0) from_last_team.wait();
    S s = *handed_over;
    const auto take_step = [&](int r, bool cut) {
      const Written<S> out = advance<kOp>(s, {a[r], x[r], h[r], cut});
      x[r] = out.y;
      h[r] = out.da_out;
    };
    if (!whole) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        const S before = s;
        take_step(r, (cuts >> r & 1u) != 0);
        s = r < there.end ? s : before;
        h[r] = r < there.end ? h[r] : S(0);
      }
    } else if (__any_sync(kAllLanes, cuts != 0)) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) take_step(r, (cuts >> r & 1u) != 0);
    } else {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) take_step(r, false);
    }
    if (s0 + kSteps < time) {
      *handed_over = s;
      to_next_team.arrive();
    } else if (valid && p.final.data) {
      store_one(p.final, channel, s);
    }

    if (valid && p.y.data) {
      write(static_cast<Y*>(p.y.data) + offset + s0 * y_stride, y_stride, x, there);
    }
    if constexpr (kOp == Op::kCotangent) {
      if (!p.da_over_time) {
        if (valid && p.da_out.data) {
          write(static_cast<A*>(p.da_out.data) + offset + s0 * y_stride, y_stride, h, there);
        }
      } else {
        S sum = h[0];
#pragma unroll
        for (int r = 1; r < kSteps; ++r) sum = sum + h[r];
        da_sum = da_sum + sum;
      }
    }
  }

  if constexpr (kOp == Op::kCotangent) {
    if (!p.da_out.data || !p.da_over_time) return;
    // The teams' sums, added up in the teams' order.
    for (int team = 0; team < plan.teams; ++team) {
      __syncthreads();
      if (team != place.team) continue;
      const S sum = team == 0 ? da_sum : *handed_over + da_sum;
      if (team + 1 < plan.teams) {
        *handed_over = sum;
      } else if (valid) {
        store_one(p.da_out, channel, sum);
      }
    }
  }
}

namespace sequential {

template <Op kOp, class A, class B, class H>
cudaError_t launch_op(const Problem& problem, const SequentialPlan& plan, cudaStream_t stream) {
  const auto kernel = sequential_kernel<kOp, A, B, H>;
  const int bytes = sequential_bytes(kOp, Streams<kOp, A, B, H>::kTypes, plan);
  // The same for every call: another thread may be launching this kernel with another size.
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.most_bytes);
  if (raised != cudaSuccess) return raised;
  kernel<<<dim3(static_cast<unsigned>(plan.blocks)), 32 * plan.groups * plan.teams, bytes,
           stream>>>(problem, plan);
  return cudaGetLastError();
}

}  // namespace sequential

template <class A, class B, class H>
cudaError_t launch_sequential(const Problem& problem, const SequentialPlan& plan,
                              cudaStream_t stream) {
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
