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
#include "cuda/sum_over_tiles.cuh"

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

// Where a thread stands in its block: warps lie [team][group], a group being 32 channels. Groups
// are neighbours, or where outer indices are stacked have the same inner indices of successive
// outer ones.
struct Place {
  int groups;
  int team;
  int group;
  int lane;
  int first_channel;  // of the block
  int group_stride;   // from a group's channels to the next one's
  __device__ Place(const Problem& p, const SequentialPlan& plan)
      : groups(plan.groups),
        team(static_cast<int>(threadIdx.x) / 32 / plan.groups),
        group(static_cast<int>(threadIdx.x) / 32 % plan.groups),
        lane(static_cast<int>(threadIdx.x) % 32),
        first_channel(static_cast<int>(blockIdx.x) * plan.groups * 32),
        group_stride(32) {
    if (plan.stacked) {
      group_stride = static_cast<int>(p.inner);
      const int segments = group_stride / 32, block = static_cast<int>(blockIdx.x);
      const int stack = block / segments;
      first_channel = stack * plan.groups * group_stride + (block - stack * segments) * 32;
    }
  }
  __device__ int column() const { return group * 32 + lane; }
  __device__ int channel(int column) const {
    return first_channel + column / 32 * group_stride + column % 32;
  }
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
// a warp's channels, each lane copies one step's element to the ring, [slot][group][step]: a load a
// turn ahead would wait for all copies that were ordered before it, wherever its element lies. Of
// any other, each thread loads its own elements when they are needed. (Copying element by element
// ahead of time is slower.)
template <class T, class S, int kSteps>
class Stream {
 public:
  static constexpr int kRowBytes = 32 * static_cast<int>(sizeof(T));  // of one group
  static constexpr int kGroupBytes = kSteps * kRowBytes;
  static constexpr int kWordBytes = sizeof(T) == 2 ? 4 : static_cast<int>(sizeof(T));

  // The row of step s holds time at(s) - past.
  __device__ Stream(const Input& in, Copies copies, const Problem& p, const SequentialPlan& plan,
                    const Walk& walk, const Place& place, int past, int channel, char* ring)
      : mine_(ring + place.group * kGroupBytes + place.lane * static_cast<int>(sizeof(T))),
        to_(mine_) {
    int step = place.team * kSteps;
    if (!in.data || in.at.time_stride == 0) {
      way_ = Way::kFixed;
    } else if (copies != Copies::kPieces) {
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
      channel = min(place.channel(column / static_cast<int>(sizeof(T))),
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
    if (way_ == Way::kDirect && copies == Copies::kWords) {
      int same;
      __match_all_sync(kAllLanes, reinterpret_cast<uint64_t>(from_), &same);
      if (same != 0) {
        way_ = Way::kByWarp;
        row_ = place.lane;
        from_ += row_ * stride_;
        mine_ = ring + place.group * kGroupBytes;
        to_ = mine_ + row_ * kWordBytes;
        // Of two-byte elements the words that they are in are copied. Turns are whole words.
        mine_ += reinterpret_cast<uintptr_t>(source) & 2;
        from_ -= reinterpret_cast<uintptr_t>(from_) & 2;
      }
    }
  }

  // Orders the copies of the team's next stage, as far as it exists.
  __device__ __forceinline__ void fetch(Span there, int slot) {
    if (way_ != Way::kRing && way_ != Way::kByWarp) return;
    const char* from = from_;
    from_ += turn_;
    char* to = to_ + slot * kGroupBytes;
    if (way_ == Way::kByWarp) {
      if (row_ < kSteps && there.contains(row_)) copy_async<kWordBytes>(to, from);
      return;
    }
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
      const char* even = mine_ + slot * kGroupBytes;
      const bool upper = (reinterpret_cast<uintptr_t>(even) & 2) != 0;  // half of a word
      const char* odd = (stride_ & 2) == 0 ? even : upper ? even - 2 : even + 2;
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        out[r] = load_as<S>(*reinterpret_cast<const T*>((r % 2 ? odd : even) + r * kWordBytes));
      }
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
  S value_ = S(0);  // of every step
};

// Stands in for an operand that an operation does not have.
template <class S, int kSteps>
class NoStream {
 public:
  static constexpr int kGroupBytes = 0;
  template <class... Args>
  __device__ explicit NoStream(const Args&...) {}
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

// Adds up a stack of kGroups groups, [group][step]; of every kGroups-th of its first `steps` steps,
// the first of which is the first that `stack` points to.
template <int kSteps, int kGroups, class S>
__device__ __forceinline__ void add_stack(const S* stack, S* out, int64_t stride, int steps) {
  constexpr int kMine = kSteps / kGroups;
  static_assert(kSteps % kGroups == 0);
  S sums[kMine];
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    sums[k] = stack[k * kGroups * 32];
#pragma unroll
    for (int group = 1; group < kGroups; ++group) {
      sums[k] = sums[k] + stack[(group * kSteps + k * kGroups) * 32];
    }
  }
  stride = opaque(stride * kGroups);
#pragma unroll
  for (int k = 0; k < kMine; ++k) {
    if (k * kGroups < steps) *out = sums[k];
    out += stride;
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

// Where kSum asks for it da_out are sums: over a warp's inner indices, (outer, inner / 32, time),
// or over the outer ones that a block stacks, (outer / plan.groups, time, inner).
template <Op kOp, class A, class B, class H, DaSum kSum>
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
  const Place place(p, plan);
  const int time = static_cast<int>(p.time);
  // Threads without a channel walk the last one again and write nothing.
  const int wanted = place.channel(place.column());
  const int channel = min(wanted, static_cast<int>(p.channels()) - 1);
  const bool valid = channel == wanted;

  // Behind the hand-over, a state for each column, lie the rings, [team][operand].
  S* const handed_over = reinterpret_cast<S*>(shared) + place.column();
  char* ring = shared + place.groups * 32 * kHandOverBytes +
               place.team * place.groups * plan.slots * Of::kStageBytes;
  const auto next_ring = [&](int group_bytes) {
    char* const mine = ring;
    ring += place.groups * plan.slots * group_bytes;
    return mine;
  };
  typename Of::AStream a_stream(p.a, plan.a, p, plan, walk, place, 0, channel,
                                next_ring(Of::AStream::kGroupBytes));
  typename Of::XStream x_stream(p.x, plan.x, p, plan, walk, place, 0, channel,
                                next_ring(Of::XStream::kGroupBytes));
  typename Of::DaStream da_stream(p.da, plan.da, p, plan, walk, place, 0, channel,
                                  next_ring(Of::DaStream::kGroupBytes));
  typename Of::HStream h_stream(p.h, plan.h, p, plan, walk, place, walk.past, channel,
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

  const int turn = plan.teams * kSteps;  // steps from a team's stage to its next
  const int slots = plan.slots * place.groups;
#pragma unroll 1
  for (int k = 0; k < plan.slots; ++k) {
    fetch(place.team * kSteps + k * turn, k * place.groups);
  }

  const NamedBarrier within_team(1 + place.team, 32 * place.groups);
  const int next_team = place.team + 1 == plan.teams ? 0 : place.team + 1;
  const NamedBarrier from_last_team(1 + plan.teams + place.team, 64 * place.groups);
  const NamedBarrier to_next_team(1 + plan.teams + next_team, 64 * place.groups);
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
  // What this thread writes of sums of da counts from the walk's step 0.
  [[maybe_unused]] S* const sums =
      static_cast<S*>(p.da_out.data) +
      (kSum == DaSum::kInner
           ? channel / 32 * p.time + walk.at(0)
           : (at_out.o / place.groups * p.time + walk.at(0)) * p.inner + at_out.i);
  [[maybe_unused]] const int64_t sums_stride = kSum == DaSum::kInner ? walk.step() : y_stride;
  // The stage's da of this team, [group][step][lane], behind the rings.
  [[maybe_unused]] S* const stack =
      reinterpret_cast<S*>(shared + sequential_bytes(kOp, Of::kTypes, plan)) +
      place.team * place.groups * kSteps * 32;

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
    if constexpr (kSum == DaSum::kInner) {
      const int step = LaneSums<S, kSteps>::add(h, place.lane);
      if (valid && place.lane % LaneSums<S, kSteps>::kSame == 0 && step < there.end) {
        sums[(s0 + step) * sums_stride] = h[0];
      }
    } else if constexpr (kSum == DaSum::kOuter) {
      // Each group adds up some of the steps. The barriers before the team's next stage keep that
      // from being overwritten too early.
#pragma unroll
      for (int r = 0; r < kSteps; ++r) stack[(place.group * kSteps + r) * 32 + place.lane] = h[r];
      within_team.wait();
      const S* const mine = stack + place.group * 32 + place.lane;
      S* const out = sums + (s0 + place.group) * sums_stride;
      if (place.groups == 2) {
        add_stack<kSteps, 2>(mine, out, sums_stride, there.end - place.group);
      } else {
        add_stack<kSteps, 4>(mine, out, sums_stride, there.end - place.group);
      }
    } else if constexpr (kOp == Op::kCotangent) {
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

  if constexpr (kOp == Op::kCotangent && kSum == DaSum::kNone) {
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

template <Op kOp, class A, class B, class H, DaSum kSum = DaSum::kNone>
cudaError_t launch_op(const Problem& problem, const SequentialPlan& plan, cudaStream_t stream) {
  const auto kernel = sequential_kernel<kOp, A, B, H, kSum>;
  using Of = Streams<kOp, A, B, H>;
  int bytes = sequential_bytes(kOp, Of::kTypes, plan);
  if (kSum == DaSum::kOuter) bytes += plan.teams * plan.groups * stack_bytes(Of::kTypes);
  // The same for every call: another thread may be launching this kernel with another size.
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.most_bytes);
  if (raised != cudaSuccess) return raised;
  kernel<<<dim3(static_cast<unsigned>(plan.blocks)), 32 * plan.groups * plan.teams, bytes,
           stream>>>(problem, plan);
  return cudaGetLastError();
}

// da summed over runs of inner or outer indices.
template <class A, class B, class H>
cudaError_t launch_summed(const Problem& problem, const SequentialPlan& plan, void* workspace,
                          cudaStream_t stream) {
  using S = StateOf<B>;
  const int64_t inner_run = problem.da_inner_run, outer_run = problem.da_outer_run;
  Problem with_sums = problem;
  with_sums.da_out = {workspace, problem.state};
  TileSums sums;
  cudaError_t error;
  if (da_sum(problem) == DaSum::kInner) {
    error = launch_op<Op::kCotangent, A, B, H, DaSum::kInner>(with_sums, plan, stream);
    const int64_t beside = problem.inner / inner_run;
    sums = {problem.outer * beside, inner_run / 32, problem.time, beside};
  } else {
    error = launch_op<Op::kCotangent, A, B, H, DaSum::kOuter>(with_sums, plan, stream);
    sums = {problem.outer / outer_run, outer_run / plan.groups, problem.time * problem.inner, 1};
  }
  if (error != cudaSuccess) return error;
  return sum_over_tiles(problem.da_out, static_cast<const S*>(workspace), sums, stream);
}

}  // namespace sequential

template <class A, class B, class H>
cudaError_t launch_sequential(const Problem& problem, const SequentialPlan& plan, void* workspace,
                              cudaStream_t stream) {
  if (problem.da_over_runs()) {
    return sequential::launch_summed<A, B, H>(problem, plan, workspace, stream);
  }
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
