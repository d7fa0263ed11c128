// Which kernel runs a problem, and with which tiles. Host code, a pure function of the problem
// (and, for the choice of path, of the number of multiprocessors), so that the workspace can be
// sized when JAX lowers the call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace jax_scan {

// ---- The single pass that is parallel in time (lookback.cuh) ----

inline constexpr int kTileThreads = 256;

// Steps that one thread keeps in registers: 64 bytes of each operand, in the state's type.
JAX_SCAN_HD constexpr int steps_per_thread(int state_bytes) { return 64 / state_bytes; }

// Blocks that a multiprocessor holds; each is working on one tile while the next tile's operands
// are on their way.
JAX_SCAN_HD constexpr int blocks_per_multiprocessor(int state_bytes) {
  return state_bytes == 16 ? 1 : 2;
}

// Shared memory in which a block keeps the maps of its predecessors while it looks back.
inline constexpr int kWindowBytes = 16 * 1024;

// What a tile tells its successors travels in packets of 16 bytes, 8 of them payload.
JAX_SCAN_HD constexpr int packets_per_map(int state_bytes) {
  return state_bytes > 4 ? 2 * state_bytes / 8 : 1;
}

struct Tiling {
  int32_t lanes;  // channels of a tile, a power of two
  int32_t lanes_log2;
  int32_t window;      // predecessors that one look-back may span
  int64_t tile_steps;  // time steps of a tile
  int64_t tiles;       // tiles along time
  int64_t groups;      // tiles across channels
  // The workspace: a counter of the tiles handed out, then the packets, both zeroed before the
  // kernel starts, ...
  size_t packets_offset;
  size_t zeroed_bytes;
  // ... then the sums of da over each tile, per tile and channel.
  size_t sums_offset;
  size_t bytes;  // all of it
};

constexpr size_t align_up(size_t n) { return (n + 255) / 256 * 256; }

// Lanes run over channels as far as neighbouring channels are neighbours in memory (32 fill a
// 128-byte line), and over time beyond that. Short runs get more channels, so that no thread is
// left without a step.
constexpr Tiling tile(Op op, int64_t outer, int64_t time, int64_t inner, DType state) {
  const int64_t channels = outer * inner;
  const int steps = steps_per_thread(byte_size(state));
  Tiling t{};
  t.lanes = 1;
  while (t.lanes < 32 && t.lanes < inner) t.lanes *= 2;
  while (t.lanes < kTileThreads && t.lanes < channels &&
         int64_t{kTileThreads} / t.lanes * steps >= 2 * time) {
    t.lanes *= 2;
  }
  while ((1 << t.lanes_log2) < t.lanes) ++t.lanes_log2;
  t.tile_steps = int64_t{kTileThreads} / t.lanes * steps;
  t.tiles = (time + t.tile_steps - 1) / t.tile_steps;
  t.groups = (channels + t.lanes - 1) / t.lanes;
  t.window = kWindowBytes / (2 * byte_size(state)) / t.lanes;
  const size_t places = static_cast<size_t>(t.tiles) * t.groups * t.lanes;
  t.packets_offset = 256;
  t.zeroed_bytes = t.tiles == 1
                       ? t.packets_offset
                       : t.packets_offset + places * packets_per_map(byte_size(state)) * 16;
  t.sums_offset = align_up(t.zeroed_bytes);
  t.bytes = t.sums_offset + (op == Op::kCotangent ? places * byte_size(state) : 0);
  return t;
}

// ---- The pipeline that walks each channel's time in order (sequential.cuh) ----

// The types of a, b and h, which settle the types of every stream.
struct StreamTypes {
  DType a, b, h;
};

// The shape of the ring: bytes of a channel in a stage x stages. Fraction of the limit on an H200
// in fp32, at (32,4096,256), (8,2048,2048), (2,4096,4096) and (4,4096,2560):
// clang-format off
//   scan       64 x 6   0.91 0.91 0.95 0.87
//              64 x 7   0.90 0.89 0.94 0.85
//              64 x 8   0.85 0.88 0.87 0.83
//   cotangent  32 x 10  0.87 0.89 0.96 0.79
//              32 x 12  0.86 0.88 0.95 0.76
//              64 x 8   0.82 0.88 0.82 0.76
// clang-format on
JAX_SCAN_HD constexpr int stage_steps(Op op, StreamTypes t) {
  return (op == Op::kScan ? 64 : 32) / byte_size(t.b);
}
JAX_SCAN_HD constexpr int ring_stages(Op op) { return op == Op::kScan ? 6 : 10; }

// Shared memory of one warp.
JAX_SCAN_HD constexpr int ring_bytes(Op op, StreamTypes t) {
  const int a = byte_size(t.a), b = byte_size(t.b), h = byte_size(t.h);
  const int per_step = op == Op::kScan ? a + b : op == Op::kTangent ? 2 * a + b + h : a + 2 * h;
  return ring_stages(op) * stage_steps(op, t) * 32 * per_step;
}

struct SequentialPlan {
  int64_t blocks;
  int warps;  // of a block; 0: there are too few channels for this path
};

// It pays once the channels alone keep the memory busy: a warp keeps a ring in flight, a
// multiprocessor needs about 26 KB in flight, so nearly every multiprocessor must have a block.
// Wide blocks read long rows, which memory likes: as many warps as still leave a block for (nearly)
// every multiprocessor.
constexpr SequentialPlan plan_sequential(Op op, StreamTypes t, int64_t channels,
                                         int multiprocessors, int shared_bytes) {
  for (int warps : {4, 2, 1}) {
    const int64_t blocks = (channels + warps * 32 - 1) / (warps * 32);
    if (10 * blocks >= 9 * int64_t{multiprocessors} && warps * ring_bytes(op, t) <= shared_bytes) {
      return {blocks, warps};
    }
  }
  return {0, 0};
}

}  // namespace jax_scan
