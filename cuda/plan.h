// Which kernel runs a problem, and with which tiles. Host code, a pure function of the problem
// (and, for the choice of path, of the number of multiprocessors), so that the workspace can be
// sized when JAX lowers the call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace jax_scan {

constexpr int64_t divide_up(int64_t n, int64_t d) { return (n + d - 1) / d; }
constexpr size_t align_up(size_t n) { return (n + 255) / 256 * 256; }

// What a tile tells its successors travels in packets of 16 bytes, 8 of them payload.
JAX_SCAN_HD constexpr int packets_per_map(int state_bytes) {
  return state_bytes > 4 ? 2 * state_bytes / 8 : 1;
}

// ---- The single pass that is parallel in time (chained.cuh) ----

inline constexpr int kTileThreads = 256;
inline constexpr int kMostChannels = 64;  // of a tile
inline constexpr int kBundle = 32;        // channels whose states go through the tiles together

// Shorter lines leave most of a warp without work.
inline constexpr int kShortestLine = 256;

// Blocks that a multiprocessor is meant to hold, for which registers and shared memory are shared
// out: while one waits for its state, the others' operands are on their way. `major` is the GPU's
// compute capability: for two blocks, what a single channel's gradient holds in registers is
// spilled on 7.5 and 8.0.
JAX_SCAN_HD constexpr int chained_blocks(Op op, bool line, int channels_of_thread, int state_bytes,
                                         int major) {
  const bool held = !line && channels_of_thread == 1;
  if (op == Op::kScan && state_bytes == 4 && !held) return 3;
  return op == Op::kCotangent && held && major < 9 ? 1 : 2;
}

// Of each operand, a thread's segment: less where it is held in registers.
JAX_SCAN_HD constexpr int segment_bytes(bool line, int channels) {
  return line || channels > 1 ? 128 : 64;
}
JAX_SCAN_HD constexpr int segment_steps(bool line, int channels, int bytes) {
  return segment_bytes(line, channels) / bytes / channels;
}

struct Tiling {
  int32_t warps;          // of a block
  int32_t time_warps;     // of them, those that divide a tile's time
  int32_t lanes_log2;     // threads of a warp side by side across channels
  int32_t channels;       // of a tile, a power of two
  int64_t tile_steps;     // time steps of a tile
  int64_t tiles;          // tiles along time
  uint32_t groups;        // tiles across channels
  uint32_t chain_blocks;  // blocks that carry states from tile to tile; see plan_chain()
  int32_t chain_team;     // their warps that share a bundle
  int32_t maps_bytes;     // shared memory for maps
  // The workspace: a counter of the tiles handed out, the tiles' places, sums of da.
  size_t places_offset, sums_offset;
  size_t bytes;  // all of it
};

// How many tiles back a block looks for a state, where tiles across channels are no fewer: the
// chain is then no more tiles behind. Looks of 8 and of 16 tiles cost more than they gain at
// (1,1048576,64), where the chain is some 30 tiles behind: 0.77 and 0.73 of the limit, not 0.80.
inline constexpr uint32_t kLookBack = 8;

// Bundles that one warp of the chain carries.
inline constexpr int kMostTurns = 16;

// The blocks that carry states from tile to tile.
struct Chain {
  int64_t blocks;  // 0: these channels are too many
  int32_t team;    // warps for each bundle; with 1, a warp may have several
};

// Of as many blocks as a GPU holds at a time, few are the chain, since they keep others from their
// places while they wait: kernels that share the GPU must not fill it with their chains. A block
// has `warps` warps for it; teams are of `most_team` at most.
constexpr Chain plan_chain(int64_t tiles, int64_t bundles, int32_t warps, int32_t most_team,
                           int64_t resident) {
  if (tiles == 1) return {0, 1};
  const int64_t most = std::max(resident / 16, int64_t{1});
  const int64_t wanted = std::min(most, int64_t{8});
  int32_t team = most_team;
  while (team > 1 && divide_up(bundles * team, warps) > wanted) team /= 2;
  const int64_t needed = divide_up(bundles, int64_t{kMostTurns} * warps);
  const int64_t blocks = std::max(needed, std::min(divide_up(bundles * team, warps), wanted));
  return {needed > most ? 0 : blocks, team};
}

constexpr Chain plan_chain(const Tiling& t, int64_t resident) {
  return plan_chain(t.tiles, divide_up(int64_t{t.groups} * t.channels, kBundle), t.warps, t.warps,
                    resident);
}

// `channels_of_thread` x `steps`: a thread's share; `line`: see chained.cuh.
constexpr Tiling chained_tiling(bool line, int channels_of_thread, int steps, int state_bytes,
                                int64_t channels, int64_t time) {
  Tiling t{};
  t.warps = kTileThreads / 32;
  t.time_warps = t.warps;
  if (line) {
    while (t.time_warps > 1 && int64_t{t.time_warps} / 2 * 32 * steps >= time) t.time_warps /= 2;
    // Smaller blocks, if four warps hold all of time: at 8190 x 4095 in fp32 0.75 and 0.79 of the
    // limit, not 0.72 and 0.72. In bf16 two warps do, and two blocks for one lose 3 and 5 %.
    if (t.time_warps == 4) t.warps = 4;
    t.channels = t.warps / t.time_warps;
    t.tile_steps = int64_t{t.time_warps} * 32 * steps;
  } else {
    // As wide as a line of memory, 128 bytes.
    const int lanes = 128 / (segment_bytes(line, channels_of_thread) / steps);
    while ((1 << t.lanes_log2) < lanes &&
           (int64_t{channels_of_thread} << t.lanes_log2) < channels) {
      ++t.lanes_log2;
    }
    // Few short channels: tiles half as wide need no chain if they hold all of time.
    const int half = std::max(t.lanes_log2 - 1, 0);
    const int64_t half_steps = int64_t{t.warps} * (32 >> half) * steps;
    if (half_steps >= time && half_steps < 2 * time &&
        divide_up(channels, int64_t{channels_of_thread} << half) <= 264) {
      t.lanes_log2 = half;
    }
    t.channels = channels_of_thread << t.lanes_log2;
    t.tile_steps = int64_t{t.warps} * (32 >> t.lanes_log2) * steps;
  }
  t.tiles = divide_up(time, t.tile_steps);
  t.groups = static_cast<uint32_t>(divide_up(channels, t.channels));
  t.maps_bytes = t.warps * (line ? 1 : t.channels) * 5 * state_bytes;
  const int64_t bundles = divide_up(int64_t{t.groups} * t.channels, kBundle);
  const size_t places = t.tiles > 1 ? static_cast<size_t>(t.tiles) * bundles * kBundle : 0;
  t.places_offset = 256;
  t.sums_offset = align_up(t.places_offset + places * 2 * state_bytes);
  t.bytes = t.sums_offset + static_cast<size_t>(t.tiles) * channels * state_bytes;
  return t;
}

// ---- The pipeline that is parallel in time (piped.cuh) ----

inline constexpr int kPipedWalkers = 256;    // threads that compose maps; as many run the steps
inline constexpr int kPipedChainWarps = 16;  // of a block that is part of the chain
// Warps of the chain for each bundle, and tiles that they take at a time. Teams of four:
// (1,262144,16) 0.53 0.58 of the limit instead of 0.56 0.65 on an H200, (1,1048576,64) 0.79 0.75
// instead of 0.90 0.89 with tiles of 64 channels. Batches of 4, 16 and 32 there: 0.60, 0.86 and
// 0.75 instead of 0.88.
inline constexpr int kPipedTeam = 8;
inline constexpr int kPipedBatch = 8;
// Tiles across channels with which blocks look for a state of 8 bytes in the places of the last
// kLookBack tiles: (1,65536,256) in float64 (16 of them) 0.905 0.938 of the limit instead of 0.875
// 0.904 on an H200, forward and backward, with resets 0.898 0.929 instead of 0.876 0.880. With more
// of them, (4,16384,512) in complex64 (64), 0.899 0.928 instead of 0.910 0.925, with fewer,
// (7,4097,255) in float64, 0.578 0.611 instead of 0.611 0.639. States of 4 bytes gain nothing:
// (4,16384,512) in bfloat16 (32) 0.847 0.871 instead of 0.842 0.869, with a of (D,) 0.757 instead
// of 0.772.
inline constexpr int kPipedLeastLooking = 8, kPipedMostLooking = 48;
// What a multiprocessor has on its way at a time, in operands of tiles: two of 32 KB, or three of
// 16 to 21. Of the limit with up to 48, 64, 96 KB and without a bound: (1,1048576,64) in float32
// forward (32 KB) 0.902 0.902 0.889 0.886, (4,16384,512) in bfloat16 backward (20 KB) 0.853 0.869
// 0.862 0.861, (1,262144,16) in float32 backward (16 KB) 0.725 0.709 0.701 0.696.
inline constexpr int kPipedBytesAhead = 54 * 1024;
inline constexpr int kPipedLeastLanes = 8;  // fewer leave nothing for bulk copies
inline constexpr int kPipedPlacesOffset = 256;

// How a comes: in rows as x does, also where these are the same for all outer indices; without
// time, once for each tile's channels; where it is the same for all inner indices, as runs of a
// tile's times; where it is the same for all outer indices and da is summed over these, once for a
// stack of tiles.
enum class PipedA : uint8_t { kNone, kRows, kFixed, kRuns, kStack };

// There are kernels for it. Channels of 16 bits that cannot go in pairs are few; in stacks pairs
// gain nothing over sequential.cuh, 0.46 0.45 of the limit backward at (32,4096,256) and
// (8,2048,2048) in bfloat16 instead of 0.45 0.47.
constexpr bool piped_takes(PipedA way, int a_bytes, int b_bytes, int vector) {
  if (way == PipedA::kStack) return a_bytes == b_bytes && b_bytes > 2;
  return way == PipedA::kRows || (way != PipedA::kNone && (b_bytes > 2 || vector > 1));
}

// Steps of a thread, and stages: up to 192 KB of operands.
struct PipedRing {
  int steps, stages;
};
// By how a comes; and the bytes of b in a narrow tile's row.
struct PipedRings {
  int line;
  PipedRing scan, cotangent;
};

// The kernels of piped.cuh. Operands and results of those whose threads have two channels must be
// aligned for pairs, of 16 bits for each: one by one these are 0.61 0.79 of the limit, not 0.81
// 0.85, at (4,16384,512) in bfloat16 on an H200, forward and backward. Half as many steps as here
// in twice as many stages do not find room beside their maps.
struct PipedKernel {
  int a_bytes, b_bytes;  // of an element; h has those of b
  bool complex;
  int vector;  // neighbouring channels of a thread
  PipedRings rows, fixed, runs;
  PipedRing stack;
  constexpr PipedRings rings(PipedA way) const {
    if (way == PipedA::kStack) return {fixed.line, stack, stack};
    return way == PipedA::kRows ? rows : way == PipedA::kFixed ? fixed : runs;
  }
  constexpr PipedRing ring(Op op, PipedA way) const {
    return op == Op::kCotangent ? rings(way).cotangent : rings(way).scan;
  }
  constexpr int state_bytes() const { return b_bytes > 4 ? b_bytes : 4; }
};
// For float32 20 steps in 3 stages are as good backward at (4,16384,512), but 0.905 of the limit
// instead of 0.93 at (1,1048576,64). For complex numbers rows of 128 bytes are 0.86 instead of 0.90
// forward at (4,16384,512), since each segment's map takes so long.
//
// Of a that is the same for all times, or inner indices, a stage holds next to nothing, and is
// longer. With a of (D,), forward and backward at (4,16384,512):
//   fp32       {32, 3} 0.819 0.87   {32, 4} 0.844   {24, 4} 0.825 backward   {24, 6} 0.76
//   complex64  {32, 3} 0.91   {20, 4} 0.88   {16, 5} 0.83   backward {16, 3} 0.88   {14, 3} 0.84
//   bf16       {32, 4} 0.70   {32, 3} 0.69   backward {32, 3} 0.75   {24, 3} 0.66
// Of stacks at (32,4096,256) in fp32 {16, 6} 0.77, {16, 5} 0.74, {20, 4} 0.62: that one holds too
// much in registers, and spills. The others hold as much as shared memory allows; they have not
// been compared with each other.
// clang-format off
inline constexpr PipedKernel kPipedKernels[] = {
    {4, 4, false, 1, {128, {32, 3}, {16, 4}}, {128, {32, 4}, {32, 3}}, {128, {32, 5}, {32, 3}},
     {16, 6}},
    {2, 2, false, 2, {128, {32, 3}, {20, 3}}, {128, {32, 4}, {32, 3}}, {128, {32, 4}, {20, 4}}, {}},
    {2, 2, false, 1, {64, {32, 6}, {32, 4}}, {}, {}, {}},
    {4, 2, false, 2, {128, {20, 3}, {16, 3}}, {128, {32, 4}, {32, 3}}, {128, {32, 4}, {20, 4}}, {}},
    {4, 2, false, 1, {64, {32, 4}, {32, 3}}, {}, {}, {}},
    {8, 8, false, 1, {128, {16, 3}, {10, 3}}, {256, {32, 3}, {16, 3}}, {256, {24, 3}, {14, 3}},
     {8, 5}},
    {8, 8, true, 1, {256, {16, 3}, {10, 3}}, {256, {32, 3}, {16, 3}}, {256, {28, 3}, {14, 3}},
     {8, 5}}};
// clang-format on
constexpr PipedKernel piped_kernel(int a_bytes, int b_bytes, bool complex, int vector) {
  for (const PipedKernel& k : kPipedKernels) {
    if (k.a_bytes == a_bytes && k.b_bytes == b_bytes && k.complex == complex &&
        k.vector == vector) {
      return k;
    }
  }
  return {};
}

inline constexpr int kMostStackWidth = 128;  // channels of a stack

// Channels of a tile that is a box; 0: not a box, as these need rows of whole 16 bytes. Narrow
// tiles are long ones, of which the chain has fewer: 32 channels instead of 64 are 0.836 0.900 of
// the limit instead of 0.821 0.875 at (1,65536,256), forward and backward on an H200 in float32,
// and 0.807 0.830 instead of 0.760 0.806 at (16,8192,96). Rows of up to 64 channels are copied as
// one run forward (0.899 instead of 0.881 at (1,1048576,64)), but not backward (0.888 instead of
// 0.924), nor forward where a is shared (0.805 and 0.67 instead of 0.854 and 0.886 there, with a of
// (D,) and (B,L,1)).
constexpr int64_t piped_box_width(Op op, const PipedKernel& k, PipedA way, int64_t inner) {
  const int64_t piece = 16 / k.b_bytes, narrow = k.rings(way).line / k.b_bytes, wide = 2 * narrow;
  if (inner % piece != 0 || inner <= (op == Op::kScan && way == PipedA::kRows ? wide : narrow))
    return 0;
  const int64_t all = divide_up(inner, narrow) * narrow;
  // Not where a tile of few channels is left over.
  if (8 * (all - inner) <= inner) return narrow;
  return divide_up(divide_up(inner, divide_up(inner, wide)), piece) * piece;
}

struct PipedTiling {
  bool boxes;          // tiles are boxes of tensors; else whole rows, which are one run of memory
  int32_t width;       // channels of a tile
  int32_t lanes;       // threads side by side across them
  int32_t segments;    // of a tile's time
  int32_t tile_steps;  // time steps of a tile
  uint32_t strips;     // tiles across inner indices
  uint32_t tiles;      // tiles along time
  uint32_t groups;     // tiles across channels; of stacks, these
  int32_t ahead;       // operands of tiles that are on their way at a time
  bool looks_back;     // for a state, to the last tiles
  PipedA way;
  bool outer_shares_a;
  uint32_t parts, outer_part;     // of outer indices, one after the other; of a stack, its tiles
  uint32_t chain_blocks, blocks;  // that carry states, and that have tiles
  int32_t chain_team;
  // The workspace: a counter of the tiles handed out, the tiles' places, sums of da.
  size_t sums_offset;
  size_t bytes;  // all of it
};

// width 0: not a problem for this path.
constexpr PipedTiling piped_tiling(Op op, const PipedKernel& k, PipedA way, int64_t outer,
                                   int64_t time, int64_t inner, int64_t parts = 1) {
  PipedTiling t{};
  const bool stacks = way == PipedA::kStack;
  if (op == Op::kTangent || (stacks && op != Op::kCotangent) ||
      !piped_takes(way, k.a_bytes, k.b_bytes, k.vector) || inner < kPipedLeastLanes * k.vector ||
      inner % k.vector != 0) {
    return t;
  }
  const int64_t box = piped_box_width(op, k, way, inner), width = box > 0 ? box : inner;
  if (width > kPipedWalkers ||
      (stacks && (box == 0 || box > kMostStackWidth || inner % kBundle != 0))) {
    return t;
  }
  t.boxes = box > 0;
  t.way = way;
  const int64_t strips = divide_up(inner, width), steps = k.ring(op, way).steps;
  const int64_t lanes = width / k.vector, segments = kPipedWalkers / lanes;
  const int64_t tiles = divide_up(time, segments * steps), groups = (stacks ? 1 : outer) * strips;
  if (time > INT32_MAX / 2 || outer > INT32_MAX / 2 || outer * inner > INT32_MAX / 2 ||
      tiles * outer * strips > INT32_MAX / 2) {
    return t;
  }
  t.outer_part = static_cast<uint32_t>(divide_up(outer, parts));
  t.parts = static_cast<uint32_t>(stacks ? divide_up(outer, int64_t{t.outer_part}) : 1);
  t.width = static_cast<int32_t>(width);
  t.lanes = static_cast<int32_t>(lanes);
  t.segments = static_cast<int32_t>(segments);
  t.tile_steps = static_cast<int32_t>(segments * steps);
  t.strips = static_cast<uint32_t>(strips);
  t.tiles = static_cast<uint32_t>(tiles);
  t.groups = static_cast<uint32_t>(groups);
  const int64_t streams = op == Op::kCotangent ? 2 : 1, rows_of_a = way == PipedA::kRows ? 1 : 0;
  const int64_t bytes = streams * k.b_bytes + rows_of_a * k.a_bytes;
  const int64_t of_operand = segments * steps * width * bytes / (streams + rows_of_a);
  t.ahead =
      static_cast<int32_t>(std::max((kPipedBytesAhead + of_operand / 2) / of_operand, int64_t{2}));
  t.looks_back = !stacks && k.state_bytes() == 8 && groups >= kPipedLeastLooking &&
                 groups <= kPipedMostLooking;
  const size_t places =
      tiles > 1 ? static_cast<size_t>(tiles) * divide_up(outer * inner, kBundle) : 0;
  t.sums_offset = align_up(kPipedPlacesOffset + places * kBundle * 2 * k.state_bytes());
  const bool over_time = op == Op::kCotangent && way == PipedA::kFixed;
  const int64_t sums = over_time ? tiles * outer * inner : t.parts > 1 ? t.parts * time * inner : 0;
  t.bytes = t.sums_offset + static_cast<size_t>(sums) * static_cast<size_t>(k.state_bytes());
  return t;
}

// Where da is summed over outer indices a block has a stack: tiles of all of these, or of a part,
// one after the other. Blocks are to have as many tiles each.
inline constexpr int64_t kLeastPart = 4, kMostParts = 16;
struct Stacks {
  int64_t parts, chain_blocks;
};
// `most_chain`: what plan_chain() wants, 0 if there is none; `least_chain`: what carries all. Costs
// are in sixths of a tile's time: beside its tiles a stack costs half a one, and sums of parts a
// launch and what is written and read of them.
constexpr Stacks plan_stacks(int64_t stacks, int64_t outer, int64_t least_chain, int64_t most_chain,
                             int64_t multiprocessors) {
  Stacks best{1, most_chain};
  int64_t least = INT64_MAX;
  for (int64_t chain = most_chain; chain >= least_chain; chain /= 2) {
    for (int64_t parts = 1; parts <= kMostParts; ++parts) {
      const int64_t tiles = divide_up(outer, parts);
      if (parts > 1 && tiles < kLeastPart) break;
      const int64_t rounds = divide_up(stacks * divide_up(outer, tiles), multiprocessors - chain);
      const int64_t sums = parts > 1 ? 6 + 4 * parts * stacks / multiprocessors : 0;
      const int64_t cost = rounds * (6 * tiles + 3) + sums;
      if (cost < least) {
        least = cost;
        best = {parts, chain};
      }
    }
    if (chain == 0) break;
  }
  return best;
}

// Of a block.
inline constexpr int kPipedSharedBytes = 227 * 1024;

// With its blocks, and those that carry states; width 0 also where the GPU has too little shared
// memory, or the chain would leave no multiprocessor to the tiles.
constexpr PipedTiling plan_piped(Op op, const PipedKernel& k, PipedA way, int64_t outer,
                                 int64_t time, int64_t inner, int multiprocessors,
                                 int shared_bytes) {
  PipedTiling t = piped_tiling(op, k, way, outer, time, inner);
  if (t.width == 0 || multiprocessors < 16 || shared_bytes < kPipedSharedBytes) return {};
  const int64_t bundles = divide_up(outer * inner, kBundle);
  Chain chain = plan_chain(t.tiles, bundles, kPipedChainWarps, kPipedTeam, multiprocessors);
  if (t.tiles > 1 && chain.blocks == 0) return {};
  if (way == PipedA::kStack) {
    const int64_t least = divide_up(bundles, int64_t{kMostTurns} * kPipedChainWarps);
    const Stacks stacks = plan_stacks(int64_t{t.tiles} * t.strips, outer,
                                      std::min(least, chain.blocks), chain.blocks, multiprocessors);
    t = piped_tiling(op, k, way, outer, time, inner, stacks.parts);
    chain.blocks = stacks.chain_blocks;
    while (chain.team > 1 && bundles * chain.team > chain.blocks * kPipedChainWarps) {
      chain.team /= 2;
    }
  }
  t.chain_blocks = static_cast<uint32_t>(chain.blocks);
  t.chain_team = chain.team;
  t.blocks = static_cast<uint32_t>(
      std::min(int64_t{t.tiles} * t.groups * t.parts, multiprocessors - chain.blocks));
  return t;
}

// ---- The pass for every shape, type and stride (general.cuh) ----

inline constexpr int kGeneralThreads = 256;

// Steps that one thread keeps in registers: 64 bytes of each operand, in the state's type.
JAX_SCAN_HD constexpr int steps_per_thread(int state_bytes) { return 64 / state_bytes; }

// Blocks that a multiprocessor holds; each is working on one tile while the next tile's operands
// are on their way.
JAX_SCAN_HD constexpr int general_blocks(int state_bytes) { return state_bytes == 16 ? 1 : 2; }

// Shared memory in which a block keeps the maps of its predecessors while it looks back.
inline constexpr int kGeneralWindowBytes = 16 * 1024;

struct GeneralTiling {
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

// Lanes run over channels as far as neighbouring channels are neighbours in memory (32 fill a
// 128-byte line), and over time beyond that. Short runs get more channels, so that no thread is
// left without a step.
constexpr GeneralTiling general_tiling(Op op, int64_t outer, int64_t time, int64_t inner,
                                       DType state) {
  const int64_t channels = outer * inner;
  const int steps = steps_per_thread(byte_size(state));
  GeneralTiling t{};
  t.lanes = 1;
  while (t.lanes < 32 && t.lanes < inner) t.lanes *= 2;
  while (t.lanes < kGeneralThreads && t.lanes < channels &&
         int64_t{kGeneralThreads} / t.lanes * steps >= 2 * time) {
    t.lanes *= 2;
  }
  while ((1 << t.lanes_log2) < t.lanes) ++t.lanes_log2;
  t.tile_steps = int64_t{kGeneralThreads} / t.lanes * steps;
  t.tiles = (time + t.tile_steps - 1) / t.tile_steps;
  t.groups = (channels + t.lanes - 1) / t.lanes;
  t.window = kGeneralWindowBytes / (2 * byte_size(state)) / t.lanes;
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

// What a step of one channel moves, in bytes.
struct Traffic {
  int copied = 0;  // through the ring
  int read = 0;
  int written = 0;
};

// Steps of a stage, all of which a thread keeps in registers. Short stages cost instructions, long
// ones registers, the more the more operands there are.
JAX_SCAN_HD constexpr int stage_steps(Op op, StreamTypes t) {
  const int size = byte_size(t.b);
  if (op == Op::kTangent) return size == 8 ? 4 : 8;
  if (op == Op::kCotangent) return size == 8 ? 4 : size == 4 ? 8 : 16;
  return size == 8 ? 8 : 16;
}

// A stage's operands, for 32 channels.
JAX_SCAN_HD constexpr int stage_bytes(Op op, StreamTypes t) {
  const int a = byte_size(t.a), b = byte_size(t.b), h = byte_size(t.h);
  const int per_step = op == Op::kScan ? a + b : op == Op::kTangent ? 2 * a + b + h : a + 2 * h;
  return stage_steps(op, t) * 32 * per_step;
}

inline constexpr int kHandOverBytes = 8;  // of a channel: the largest state
inline constexpr int kMaxSequentialWarps = 12;
inline constexpr int kMaxTeams = 6;  // each takes two of a block's 16 barriers
inline constexpr int kMaxSlots = 6;

// How an operand may be copied to shared memory: in 16-byte pieces of its rows; else its elements,
// of two bytes the words that they are in; or not at all, as a word would reach out of the array.
enum class Copies : uint8_t { kNone, kWords, kPieces };

struct SequentialPlan {
  int64_t blocks;
  int32_t groups;      // of 32 channels in a block; 0: there are too few channels for this path
  int32_t teams;       // of one warp for each group
  int32_t slots;       // stages of a team that are on their way
  int32_t most_bytes;  // of shared memory that a block of the GPU can have
  bool stacked;        // groups have the same inner indices; see DaSum
  Copies a, x, da, h;
};

// Shared memory of a block.
JAX_SCAN_HD constexpr int sequential_bytes(Op op, StreamTypes t, const SequentialPlan& plan) {
  return plan.groups * (32 * kHandOverBytes + plan.teams * plan.slots * stage_bytes(op, t));
}

// What a multiprocessor keeps in flight, reads and writes. The reads' share of it is ordered ahead;
// less leaves the memory idle, and more is as bad. Fraction of the limit on an H200 in fp32, at
// (32,4096,256), by the KB ordered ahead:
// clang-format off
//   scan                  32 KB 0.87   40 KB 0.92   48 KB 0.92   64 KB 0.88   96 KB 0.89
//   scan, a without time  24 KB 0.82   32 KB 0.89   36 KB 0.89   48 KB 0.85   64 KB 0.85
//   cotangent             36 KB 0.90   48 KB 0.90   72 KB 0.87
// clang-format on
inline constexpr int kBytesInFlight = 72 * 1024;

// This path pays once the channels alone keep the memory busy: nearly every multiprocessor must
// have a group. All blocks are as wide as each other and as the number of multiprocessors allows:
// wide blocks read long rows, and all finish at once. Stacks are of two or four groups.
constexpr SequentialPlan plan_sequential(Op op, StreamTypes t, Traffic traffic, int64_t channels,
                                         int multiprocessors, int shared_bytes,
                                         bool stacked = false) {
  SequentialPlan plan{};
  plan.most_bytes = shared_bytes;
  const int64_t groups = (channels + 31) / 32, places = std::max(multiprocessors, 1);
  if (10 * groups < 9 * int64_t{multiprocessors}) return plan;
  const int64_t rounds = (groups + 4 * places - 1) / (4 * places);
  plan.groups = static_cast<int32_t>((groups + rounds * places - 1) / (rounds * places));
  plan.stacked = stacked;
  if (stacked) plan.groups = plan.groups < 4 ? 2 : 4;
  plan.blocks = (groups + plan.groups - 1) / plan.groups;

  const int64_t ahead = int64_t{kBytesInFlight} * traffic.read /
                        std::max(traffic.read + traffic.written, 1) * places /
                        std::min(places, plan.blocks);
  const int64_t stage = int64_t{plan.groups} * 32 * stage_steps(op, t) * traffic.copied;
  const int most = std::min(kMaxTeams, kMaxSequentialWarps / plan.groups);
  // As many teams as come within a quarter of it; failing that, what comes nearest.
  int64_t nearest = INT64_MAX;
  for (int teams = most; 2 * teams >= most && nearest > ahead / 4; --teams) {
    for (int slots = 1; slots <= kMaxSlots; ++slots) {
      const int64_t more = teams * slots * stage - ahead, off = more < 0 ? -more : more;
      SequentialPlan candidate = plan;
      candidate.teams = teams;
      candidate.slots = slots;
      if (off < nearest && sequential_bytes(op, t, candidate) <= shared_bytes) {
        nearest = off;
        plan = candidate;
      }
    }
  }
  if (plan.teams == 0) plan.groups = 0;
  return plan;
}

// ---- The same walk with operands copied by boxes (boxed.cuh) ----

// Steps of a long box, all of which a thread keeps in registers; a short one has half of them.
JAX_SCAN_HD constexpr int long_box(int bytes) { return bytes == 8 ? 8 : 16; }
inline constexpr int kMostBoxSlots = 16;
inline constexpr int kWidestBox = 256;  // channels; the hardware has no wider ones
// Teams of warps, which take boxes by turns. Of the limit on an H200 with three and with five:
// fp32 (32,4096,256) forward 0.91 0.92 with resets, and bf16 (2,4096,4096) 0.83 0.95 forward, 0.79
// 0.95 backward.
inline constexpr int kBoxTeams = 5;
inline constexpr int kMostBoxWarps = 12;  // of all teams; each takes one of a block's 16 barriers
inline constexpr int kRunPlace = 128;     // bytes of a slot for a run of a
// At 17 ns a step few channels in boxes take less than the 8 and 11 us of a call of piped.cuh.
inline constexpr int64_t kShortBoxedTime = 512;

// Channels of a thread, by the bytes of b.
JAX_SCAN_HD constexpr int channels_of_lane(int bytes) { return bytes == 2 ? 2 : 1; }

// Warps of a multiprocessor for which a kernel's registers are shared out. Two blocks have short
// boxes, and nine warps each; of two 16-bit channels a thread has so much to hold that it is seven.
JAX_SCAN_HD constexpr int box_warps(int steps, int bytes) {
  return steps == long_box(bytes) ? 12 : channels_of_lane(bytes) == 1 ? 20 : 16;
}

// How a comes: by boxes as the other operands do; where it is the same for all inner indices, as
// runs of a box's steps; without time, once for each channel.
enum class BoxedA : uint8_t { kNone, kBoxes, kRuns, kFixed };

// What a multiprocessor orders ahead, as above. Of the limit on an H200 in fp32 at (32,4096,256),
// (8,2048,2048) and (2,4096,4096), with one team:
//   scan       40 KB 0.92 0.96 0.97   48 KB 0.93 0.97 0.98   56 KB 0.89 0.93 0.91
//   cotangent  36 KB 0.91 0.92 0.95   48 KB 0.92 0.96 0.97   60 KB 0.89 0.93 0.91
inline constexpr int kBoxedBytesAhead = 48 * 1024;

// With less traffic than that in the time of a stage, for each multiprocessor of the GPU, the
// teams' turns decide, and other paths are as good. Of the limit on an H200, by boxes and without,
// where it is 4.0, 5.0, 6.0 and 7.9 KB, (D,) and (B,L,1) being shapes of a:
// clang-format off
//   4.0  fp32 (16,4096,256), forward        (D,) 0.80 0.80   (B,L,1) 0.71 0.78
//   4.0  fp64 (16,4096,256), forward        (D,) 0.87 0.89   (B,L,1) 0.78 0.87
//   5.0  fp64 (4,16384,512), backward       with resets 0.81 0.86
//   6.0  fp32 (16,4096,256), backward       (D,) 0.83 0.63   (B,L,1) 0.65 0.48
//   6.0  fp64 (16,4096,256), backward       (D,) 0.92 0.70   (B,L,1) 0.81 0.53
//   6.0  bf16 (32,4096,256), plain forward  0.91 0.87
//   6.0  bf16 (32,4096,256), backward       (D,) 0.72 0.85   (B,L,1) 0.54 0.65
//   6.0  bf16 (32,4096,256), forward        with resets 0.82 0.86
//   7.9  bf16 (8,2048,2048), forward        (D,) 0.89 0.82   (B,L,1) 0.88 0.71
// clang-format on
// In complex64 few channels have no other path that is fast, unless they fit piped.cuh:
// (4,16384,512), at 3.0 KB, 0.61 0.19.
constexpr int64_t least_box_bytes(StreamTypes t, bool plain, bool few) {
  if (t.b == DType::kC64 && few) return 0;
  return (plain || byte_size(t.b) > 2 ? 9 : 14) * int64_t{512};
}

struct BoxedPlan {
  BoxedA a = BoxedA::kNone;
  bool outer_shares_a = false;
  bool plain = false;  // no resets, no sums of da, and a comes by boxes
  int64_t blocks = 0;  // 0: not a problem for this path
  int32_t strips = 0;  // blocks side by side
  int32_t width = 0;   // channels of a block
  int32_t steps = 0;   // of a box
  int32_t slots = 0;
  int32_t teams = 0;
  int32_t shared_bytes = 0;  // of a block
  int32_t most_bytes = 0;    // that a block of the GPU can have
};

// All blocks are to finish at once, so they are no more than multiprocessors if they can be, and as
// many as that with rows of at least 256 bytes: those of 128 are too short, 0.875 at (2,4096,4096),
// and 64 blocks that order twice as much ahead are as good as 128, 0.98. Where there are several
// blocks for each multiprocessor, two share what it orders ahead.
constexpr BoxedPlan plan_boxed(Op op, StreamTypes t, BoxedA way_of_a, bool plain, Traffic traffic,
                               int64_t outer, int64_t inner, int multiprocessors, int shared_bytes,
                               int multiprocessor_shared_bytes) {
  BoxedPlan plan{};
  plan.a = way_of_a;
  plan.plain = plain;
  plan.most_bytes = shared_bytes - 4096;  // beside what the kernel declares
  const int a = byte_size(t.a), b = byte_size(t.b);
  const bool cotangent = op == Op::kCotangent;
  const int64_t places = std::max(multiprocessors, 1), line = 128 / b;
  const int64_t strips = std::max(std::min(places / outer, inner / (2 * line)), int64_t{1});
  const int64_t unit = std::max(line, int64_t{32});  // lanes read all that they can of a row
  const int64_t width =
      std::min(divide_up(divide_up(inner, strips), unit) * unit, int64_t{kWidestBox});
  if (width < 2 * line || inner < width) return plan;
  plan.width = static_cast<int32_t>(width);
  plan.strips = static_cast<int32_t>(divide_up(inner, width));
  const int64_t blocks = outer * plan.strips, turns = divide_up(blocks, places);
  if (blocks > INT32_MAX || 100 * blocks < (turns == 1 ? 45 : 80) * turns * multiprocessors) {
    return plan;
  }
  // Fewer blocks order more ahead, but with wide rows of a backward 0.7 of that: on 64
  // multiprocessors, with a fp32 and b bf16, 82 and 98 KB are 0.89 and 0.915 of the limit forward
  // and 0.90 and 0.87 backward; in bf16 74 and 98 KB are 0.84 and 0.905 backward, in fp32 83 and
  // 97 KB 0.84 and 0.88.
  const int64_t resident = std::min(turns, int64_t{2});
  const int64_t at_once = std::min(blocks, resident * places);
  const int64_t missing = std::max(places - at_once, int64_t{0});
  // Less of it is reads where as much is written: in fp32 forward, with a of (D,), 36, 40, 44 and
  // 48 KB are 0.88 0.88 0.87 0.86 of the limit at (32,4096,256), 0.905 0.926 0.925 0.885 at
  // (8,2048,2048) and 0.92 0.94 0.92 0.89 at (2,4096,4096); with a of (L,D), which comes from the
  // L2 cache on top of it, 0.84 0.82 0.81 0.80 at (4,4096,2048).
  const int64_t most = traffic.read > traffic.written   ? kBoxedBytesAhead
                       : traffic.read == traffic.copied ? 5 * kBoxedBytesAhead / 6
                                                        : 3 * kBoxedBytesAhead / 4;
  const int64_t read = at_once > places
                           ? most * places / at_once
                           : most + most * missing * (cotangent && a > b ? 7 : 10) / (10 * at_once);
  const int64_t ahead = read * traffic.copied / std::max(traffic.read, 1);
  const int64_t step = width * traffic.copied;
  const auto slots_of = [&](int steps) { return ahead / (steps * step); };
  plan.steps = slots_of(long_box(b)) >= 4 ? long_box(b) : long_box(b) / 2;
  plan.slots =
      static_cast<int32_t>(std::clamp(slots_of(plan.steps), int64_t{2}, int64_t{kMostBoxSlots}));
  const auto warps = static_cast<int32_t>(divide_up(width, b == 2 ? 64 : 32));  // of a team
  // One warp of a block orders boxes. Of two blocks each has nine warps.
  const int most_warps = resident > 1 ? 8 : std::min(kMostBoxWarps, box_warps(plan.steps, b) - 1);
  plan.teams = std::min({plan.slots, kBoxTeams, most_warps / warps});
  const int64_t moved = plan.steps * width * (traffic.read + traffic.written);
  const int64_t least_moved = least_box_bytes(t, plain, 2 * at_once <= places);
  if (multiprocessors > 0 && moved * at_once < least_moved * places) return plan;
  // Sums over lanes want another team to walk meanwhile: with one, 0.80 at (64,1024,512) in fp32,
  // and sequential.cuh 0.83.
  if (multiprocessors > 0 && cotangent && way_of_a == BoxedA::kRuns && plan.teams == 1) return plan;
  const int64_t needed =
      plan.slots * (plan.steps * step + (way_of_a == BoxedA::kRuns ? kRunPlace : 0));
  // No more blocks than these find place at a time.
  const int64_t least = multiprocessor_shared_bytes / (resident + 1) + 1;
  if (std::max(needed, least) > plan.most_bytes) return plan;
  plan.shared_bytes = static_cast<int32_t>(std::max(needed, least));
  plan.blocks = blocks;
  return plan;
}

// ---- The walk through lines of contiguous time (lined.cuh) ----

// A stage is as many rows of 128 bytes of each operand as a warp has lanes, or fewer.
inline constexpr int kMostLineSlots = 32;
inline constexpr int kLineSlotsInUse = 3;         // at least, beside those on their way
inline constexpr int kLineStageBytes = 32 * 128;  // of a stage's results
inline constexpr int kMostLineWarps = 15;         // beside the one that orders
// Bytes of a line: of fewer, most of a warp has none. Of the limit on an H200 in fp32, here and in
// general.cuh: (10000,128,1) 0.235 0.29 and 0.15 0.18, (10000,100,1) 0.11 0.175 and 0.13 0.22.
inline constexpr int kShortestLined = 512;
inline constexpr int kLinesInFlight = 64;  // stages; more than slots plus warps
static_assert(kMostLineSlots + kMostLineWarps < kLinesInFlight);

// Of the limit on an H200 with 9, 12 and 15 warps:
//   scan       fp32 8192 x 4096 0.94 0.945 0.95     65536 x 512 0.69 0.79 0.84
//              bf16 8192 x 4096 0.86 0.91 0.91      1000 x 20001 0.65 0.74 0.81
//   cotangent  fp32 8192 x 4096 0.91 0.92 0.92      65536 x 512 0.83 0.96 0.96
//              bf16 8192 x 4096 0.92 0.92 0.91      1000 x 20001 0.76 0.75 0.70
// Backward more warps take places from slots: their results meet in shared memory.
JAX_SCAN_HD constexpr int line_warps(Op op) { return op == Op::kCotangent ? 12 : kMostLineWarps; }

// What a multiprocessor orders ahead, as above. Of the limit at 8192 x 4096, 2048 x 16384 and
// 32768 x 1024 in fp32:
//   scan       40 KB 0.93 0.93 0.93   48 KB 0.945 0.945 0.95   56 KB 0.90 0.90 0.92
//   cotangent  36 KB 0.93 0.915 0.93  48 KB 0.92 0.925 0.94    60 KB 0.91 0.90 0.91
inline constexpr int kLinedBytesAhead = 48 * 1024;
// Backward in fp32 something between 36 and 48 KB is best: there a stage counts as being on its way
// until its warp has composed half of its maps, 0.957 0.94 0.96. Elsewhere that takes too long:
// 0.92 to 0.90 backward at 8192 x 4096 in bf16, 0.935 to 0.92 in complex64.
JAX_SCAN_HD constexpr bool line_counts_half(Op op, int bytes) {
  return op == Op::kCotangent && bytes == 4;
}

// Pieces of 16 bytes that loops are unrolled for. One instead of two in bf16: 0.71 to 0.78 backward
// at 8192 x 4096; four in complex64: 0.94 to 0.85 forward.
JAX_SCAN_HD constexpr int line_unroll(int bytes) { return bytes == 2 ? 1 : 2; }

struct LinedPlan {
  int64_t blocks = 0;  // 0: not a problem for this path
  int32_t rows = 0;    // of a stage, 128 bytes of each operand each
  int32_t stages = 0;  // of a channel
  int32_t slots = 0;
  int32_t ahead = 0;  // stages that are on their way at a time
  int32_t warps = 0;
  int32_t operand_bytes = 0;  // of a slot
  int32_t shared_bytes = 0;   // of a block
  int32_t most_bytes = 0;     // that a block of the GPU can have
};

// `bytes`: of an element. All blocks are to finish at once, so they have as many channels each. On
// fewer multiprocessors these order more ahead each: 80 x 300000 on 80 of 132 has 0.88 0.89 of the
// limit in fp32, by chained.cuh 0.74 0.77; 64 x 262144 on 64 in fp64 0.63 0.74, by chained.cuh 0.75
// 0.83.
constexpr LinedPlan plan_lined(Op op, int bytes, int64_t channels, int64_t time,
                               int multiprocessors, int shared_bytes) {
  LinedPlan plan{};
  const int64_t places = std::max(multiprocessors, 1), of_row = 128 / bytes;
  if (channels * time < of_row) return plan;  // no whole row
  // A channel may begin anywhere in a row.
  const int64_t rows = time % of_row == 0 ? time / of_row : (time + of_row - 2) / of_row + 1;
  const int64_t turns = divide_up(channels, places), blocks = divide_up(channels, turns);
  if (multiprocessors > 0 && (time * bytes < kShortestLined || 10 * blocks < 6 * places)) {
    return plan;
  }
  plan.rows = static_cast<int32_t>(divide_up(rows, divide_up(rows, 32)));
  const int64_t stages = divide_up(rows, int64_t{plan.rows});
  if (turns * stages > INT32_MAX / 2 || channels * time / of_row > INT32_MAX / 2) return plan;
  plan.stages = static_cast<int32_t>(stages);
  plan.operand_bytes = static_cast<int32_t>(divide_up(plan.rows * 128, 1024) * 1024);
  const int operands = op == Op::kCotangent ? 3 : 2;
  const int slot = operands * plan.operand_bytes, ordered = operands * plan.rows * 128;
  plan.most_bytes = shared_bytes - 4096;  // beside what the kernel declares
  plan.warps = line_warps(op);
  const int results = plan.warps * (operands - 1) * kLineStageBytes;
  const int64_t most_slots = std::min<int64_t>((plan.most_bytes - results) / slot, kMostLineSlots);
  if (most_slots < 2 + kLineSlotsInUse) return plan;
  const int64_t ahead = (kLinedBytesAhead * places / blocks + ordered / 2) / ordered;
  plan.ahead = static_cast<int32_t>(std::clamp(ahead, int64_t{2}, most_slots - kLineSlotsInUse));
  // With too little shared memory the memory is idle half of the time.
  if (multiprocessors > 0 && 2 * plan.ahead < ahead) return plan;
  plan.slots = static_cast<int32_t>(std::min(plan.ahead + int64_t{plan.warps}, most_slots));
  // One block a multiprocessor.
  plan.shared_bytes = std::max(plan.slots * slot + results, shared_bytes / 2 + 1024);
  plan.blocks = blocks;
  return plan;
}

// ---- The walk of each thread through all times (walked.cuh) ----

inline constexpr int kWalkedThreads = 128;  // of a block

// Neighbouring channels of a thread, by the bytes of b, where these leave each multiprocessor so
// many threads. Of the limit on an H200 with one channel: fp32 (4096,4,32) 0.425 0.39 instead of
// 0.56 0.52, but (16,8,4096) 0.59 0.53 instead of 0.53 0.48; complex64 (4096,16,32) 0.78 0.74
// instead of 0.875 0.87. In bf16 four instead of two: (4096,32,32) 0.37 0.33 instead of 0.46 0.35.
JAX_SCAN_HD constexpr int walked_vector(int bytes) { return bytes == 2 ? 2 : 16 / bytes; }
inline constexpr int64_t kWalkedThreadsWanted = 200;

// Short times of many channels: a thread for each is enough, and other paths take long to begin. Of
// the limit on an H200, in walked.cuh and then in the best of the others, forward and backward;
// lines are (channels,time,1):
// clang-format off
//   fp32 (4096,1,32)    0.51  0.44  0.11 0.09    fp32 (4096,16,33)  0.73  0.74  0.55 0.58
//   fp32 (4096,64,32)   0.79  0.85  0.60 0.64    fp32 (512,16,32)   0.47  0.41  0.39 0.34
//   fp32 (512,32,32)    0.395 0.35  0.45 0.38    fp32 (1024,48,33)  0.56  0.60  0.62 0.66
//   fp32 (4096,100,33)  0.62  0.66  0.62 0.81    fp64 (4096,16,32)  0.88  0.85  0.47 0.58
//   bf16 (4096,32,32)   0.46  0.35  0.29 0.32    bf16 (1024,64,64)  0.29  0.22  0.40 0.44
//   fp32 (10000,16,1)   0.41  0.36  0.21 0.17    fp32 (10000,100,1) 0.155 0.19  0.13 0.22
//   a of (D,): fp32 (4096,16,32) 0.65 0.68  0.41 0.23    (4096,64,32) 0.665 0.74  0.79 0.50
// clang-format on
// `bytes`: of b.
constexpr bool pays_to_walk(Op op, int bytes, bool shares_a, int64_t channels, int64_t time,
                            int64_t inner) {
  if (inner == 1) return time <= 96 && time * 100 <= channels;
  if (bytes == 2) return time <= 32 && time * 2048 <= channels;
  return time <= (op == Op::kScan && shares_a ? 32 : 64) && time * 800 <= channels;
}

// Steps times channels of a block of boxed.cuh below which many of these have no time to get going:
// of the limit on an H200, in walked.cuh and in boxed.cuh, fp32 (64,8,4096) 0.83 0.81 and 0.69
// 0.82, (64,16,4096) 0.88 0.83 and 0.88 0.93; bf16 (64,8,4096) 0.41 0.36 and 0.34 0.58.
constexpr int64_t least_boxed(int bytes) { return bytes == 2 ? 2048 : 4096; }

// Where a is the same for several channels, da is summed over these.
//   kInner  over neighbouring inner indices: each warp adds up its 32 channels
//   kOuter  over outer indices: a block's groups are stacked, the same 32 inner indices of
//           successive outer ones, and the block adds these up
// A second kernel adds up what warps or blocks have.
enum class DaSum : uint8_t { kNone, kInner, kOuter };

inline DaSum da_sum(const Problem& p) {
  return p.da_inner_run > 1 ? DaSum::kInner : p.da_outer_run > 1 ? DaSum::kOuter : DaSum::kNone;
}

// Enough channels for every multiprocessor, whether the GPU is known or not: with fewer, other
// paths are so much faster that it costs less to write all of da. Stacks need twice as many. Warps
// are whole, and each lies within one run, or its block does.
inline bool sums_over_runs(const Problem& p) {
  if (p.op != Op::kCotangent) return false;
  switch (da_sum(p)) {
    case DaSum::kInner:
      return p.channels() >= 4096 && p.da_inner_run % 32 == 0;
    case DaSum::kOuter:
      return p.channels() >= 8192 && p.da_outer_run % 4 == 0 && p.inner % 32 == 0;
    case DaSum::kNone:
      break;
  }
  return false;
}

// What is added up in the end, in the state's type: the workspace of such a call. A block stacks
// two outer indices at least.
inline size_t da_sums_bytes(const Problem& p) {
  const int64_t summed = da_sum(p) == DaSum::kInner ? 32 : 2;
  return static_cast<size_t>(p.channels() / summed) * p.time * byte_size(p.state);
}

// Shared memory that a group's da takes in a stack.
constexpr int stack_bytes(StreamTypes t) {
  return stage_steps(Op::kCotangent, t) * 32 * std::max(byte_size(t.b), 4);
}

// ---- The cluster of blocks that takes all of time (cluster.cuh) ----

inline constexpr int kClusterWarps = 8;   // of a block, or half of them
inline constexpr int kPortableRanks = 8;  // blocks of a cluster that every GPU with clusters has
inline constexpr int kMostRanks = 16;

struct ClusterPlan {
  int64_t groups = 0;      // clusters; 0: the problem is not one for this path
  int32_t ranks = 0;       // blocks of a cluster
  int32_t warps = 0;       // of a block
  int32_t lanes_log2 = 0;  // threads of a warp side by side across channels
};

// Beyond so many bytes of an operand for each multiprocessor, other paths are faster: on an H200 up
// to (1,2048,1024) in fp32. 16 bits count as 32: of the limit, (4,2048,256) in bf16 0.38 0.66 here
// and 0.28 0.50 in piped.cuh, but (1,8192,512) 0.47 0.55 and 0.50 0.61, (8,2500,200) 0.22 0.28 and
// 0.45 0.54.
inline constexpr int64_t kClusterBytes = 64 * 1024;

// The pieces of rows that a block may take, and how large a cluster is then worth having, best
// first. us in a graph on an H200, (2,4096,64) in fp32, forward and backward:
//   64 bytes, 8 ranks 3.9 5.2   64 bytes, 16 ranks 4.4 6.2   128 bytes, 16 ranks 4.6 6.4
//   32 bytes, 8 ranks 4.7 6.5   16 bytes, 4 ranks 7.5 10.7
// Where 128 bytes need no more than 8 ranks they are best: (1,2048,1024) 8.4 10.5, with 64 bytes
// 9.1 12.6.
struct Pieces {
  int bytes;
  int ranks;
};
inline constexpr Pieces kPieces[] = {{128, 8}, {64, 8}, {64, 16}, {32, 8}, {32, 16}};

// For a kernel whose threads hold `steps` steps of `channels_of_thread` channels, and a GPU that
// has clusters of `most_ranks`.
constexpr ClusterPlan plan_cluster(bool line, int channels_of_thread, int steps, int bytes,
                                   int64_t channels, int64_t time, int multiprocessors,
                                   int most_ranks) {
  if (channels * time * std::max(bytes, 4) > multiprocessors * kClusterBytes) return {};
  for (const Pieces& pieces : kPieces) {
    // Lines in large clusters gain nothing over chained.cuh.
    if (line && pieces.ranks > kPortableRanks) break;
    int lanes_log2 = 0;
    const auto width = [&] { return int64_t{channels_of_thread} << lanes_log2; };
    while (!line && width() < channels && 2 * width() <= 32 &&
           2 * width() * bytes <= pieces.bytes) {
      ++lanes_log2;
    }
    const int64_t groups = divide_up(channels, width());
    const int64_t of_warp = (32 >> lanes_log2) * steps;
    int64_t ranks = divide_up(time, kClusterWarps * of_warp);
    if (groups > UINT16_MAX || ranks > std::min(pieces.ranks, most_ranks)) continue;
    // Smaller blocks where there are few: more multiprocessors take part. And where whole clusters
    // of eight fill the GPU, but wait for no places: forward and backward 7.6 10.0 instead of 8.4
    // 10.5 at (1,2048,1024), 5.4 7.0 instead of 6.1 7.7 at (1,4096,256). With half as many blocks
    // or 900 of them it is a loss: 4.3 5.6 instead of 3.9 5.1 at (2,4096,64).
    int warps = kClusterWarps;
    const int64_t blocks = groups * ranks;
    const int64_t twice = divide_up(time, kClusterWarps / 2 * of_warp);
    const bool few = twice == ranks || 2 * blocks < multiprocessors;
    const bool full = !line && ranks == kPortableRanks && 10 * blocks >= 9 * multiprocessors &&
                      blocks <= 2 * multiprocessors;
    if ((few && twice <= pieces.ranks) || (full && twice <= most_ranks)) {
      warps = kClusterWarps / 2;
      ranks = twice;
    }
    return {groups, static_cast<int32_t>(ranks), warps, lanes_log2};
  }
  return {};
}

// ---- One wave over all multiprocessors (resident.cuh) ----

inline constexpr int kResidentWarps = 16;  // of a block, at most
// Steps of a segment that are in registers, of a scan for which shared memory does not suffice.
inline constexpr int kResidentHeld = 12;
inline constexpr int kResidentBytes = 15 * 1024;  // of a block's shared memory, beside operands
// The most elements, and the fewest steps of a piece: what the workspace is sized by.
inline constexpr int64_t kMostResident = int64_t{1} << 23;
inline constexpr int kShortestPiece = 128;

struct ResidentPlan {
  int64_t blocks = 0;      // 0: not a problem for this path
  int32_t pieces = 0;      // of a strip
  int32_t strips = 0;      // of an outer index
  int32_t lanes_log2 = 0;  // channels of a strip
  int32_t warps = 0;       // of a block
  int32_t steps = 0;       // of a segment, in shared memory
  int32_t held = 0;        // and in registers
  bool line = false;
  bool boxes = false;  // strips are parts of rows
  int32_t shared_bytes = 0;
  int32_t most_bytes = 0;  // that a block of the GPU can have
};

// `bytes`: of an element.
constexpr ResidentPlan plan_resident(Op op, int bytes, bool uses_h, int64_t outer, int64_t time,
                                     int64_t inner, int multiprocessors, int shared_bytes) {
  ResidentPlan plan;
  const int64_t vector = 16 / bytes;  // elements that are copied in one
  const bool whole_rows = inner == 1 || inner == 2 || inner == 4 || inner == 8 || inner == 16;
  if (whole_rows ? time * inner % vector != 0 : inner < 32 || inner % vector != 0) return {};
  const int64_t width = whole_rows ? inner : 32;
  plan.line = inner * bytes < 32;
  plan.boxes = !whole_rows;
  while ((int64_t{1} << plan.lanes_log2) < width) ++plan.lanes_log2;
  plan.strips = static_cast<int32_t>(divide_up(inner, width));
  plan.most_bytes = shared_bytes - kResidentBytes;
  const int64_t all_strips = outer * plan.strips;
  if (outer * time * inner > kMostResident || 2 * all_strips > multiprocessors) return {};
  const int64_t most_pieces = multiprocessors / all_strips;
  for (const int held : {0, kResidentHeld}) {
    if (held > 0 && (plan.line || op == Op::kCotangent || bytes != 4)) break;
    // The number of warps with which the longest piece is shortest.
    int64_t shortest = INT64_MAX;
    for (int warps = kResidentWarps; warps > kResidentWarps / 2; --warps) {
      const int64_t segments = warps * 32 / width;
      int64_t steps =
          std::max(divide_up(time, most_pieces * segments), divide_up(kShortestPiece, segments));
      steps = std::max(steps - held, int64_t{1});
      if (width < 32) steps |= 1;                        // no two threads meet in a bank
      if (plan.boxes && bytes == 2) steps += steps & 1;  // boxes lie 128 bytes apart
      const int64_t length = segments * (steps + held);
      const int64_t all = (uses_h ? 3 : 2) * 32 * warps * steps * bytes + 16 * warps;
      if (all > plan.most_bytes || length >= std::min(shortest, time)) continue;
      shortest = length;
      plan.warps = warps;
      plan.steps = static_cast<int32_t>(steps);
      plan.held = held;
      plan.shared_bytes = static_cast<int32_t>(all);
      plan.pieces = static_cast<int32_t>(divide_up(time, length));
      plan.blocks = all_strips * plan.pieces;
    }
    if (plan.blocks > 0) break;
  }
  return plan;
}

// Where clusters take all of time, they are faster, and where a strip has few pieces, as many
// blocks share what pipelines keep busy. us on an H200 here and in the best of the others, forward
// and backward, three sets of arrays by turns; -: more than there is room for.
// clang-format off
//   (1,262144,16)   20.6 -    23.3 32.4    (1,1048576,1)  8.1 11.6  10.2 14.2
//   (1,65536,64)    19.8 -    23.6 29.9    (1,262144,1)   5.9  6.5   7.7  9.1
//   (1,50000,64)    16.1 -    20.6 23.4    (1,65536,1)    5.8  6.5   8.0  9.5
//   (1,32768,64)    12.6 16.3 15.5 18.5    (1,32768,1)    5.4  6.0   3.4  4.1
//   (1,16384,64)     7.2 10.6  9.2 14.1    (16,65536,1)   8.1 11.7   9.9 14.3
//   (1,8192,64)      6.1  6.9  4.4  6.0    (8,131072,1)   8.5 12.2   9.0 13.5
//   (1,131072,16)   13.4 15.8 16.4 21.1    (32,32768,1)   8.2 11.4   6.4 12.1
//   (1,32768,16)     6.2  7.1  8.8 10.2    (4,262144,2)  14.2 17.6  35.7 58.3
//   (1,16384,16)     5.7  6.2  4.8  6.6    (1,262144,4)   7.9 11.4  14.9 22.2
//   (1,16384,128)   12.5 15.9 13.6 22.5    (1,16384,4)    6.0  6.6   7.0 10.0
//   (8,16384,16)    12.8 15.3 14.1 20.8    (1,32768,128) 19.4 -     20.2 29.0
//   (8,8192,32)     12.6 15.7 12.2 16.4    (1,16384,256) 19.2 -     19.1 28.1
//   (1,2048,1024)   12.4 15.5 10.5 14.3
// clang-format on
// In 16 bits clusters take less. Of the limit, (1,65536,64) 0.49 0.62 here and 0.48 0.60 in
// piped.cuh, (1,32768,64) 0.27 0.53 and 0.23 0.48, (1,262144,16) 0.51 0.60 and 0.405 0.52,
// (1,16384,16) 0.24 0.24 and 0.16 0.17, (32,32768,1) 0.24 0.26 and 0.20 0.20, (1,1048576,4) 0.45
// 0.55 and 0.20 0.18.
constexpr bool pays_to_reside(const ResidentPlan& plan, int bytes, int64_t outer, int64_t time,
                              int64_t inner) {
  if (inner == 1) return bytes == 2 ? time >= 32768 : time > 32768;
  if (plan.held > 0 && plan.pieces < 24) return false;
  const bool is_small = outer * time * inner < int64_t{1} << 20;
  const bool has_clusters = bytes == 4 && inner > 4 && is_small;
  return has_clusters ? time > 16384 : time >= 16384;
}

// ---- The workspace ----

// What any of the paths needs, on any GPU. A tile of chained.cuh has at least 128 steps.
constexpr size_t workspace_bytes(Op op, int64_t outer, int64_t time, int64_t inner, DType state) {
  const size_t channels = static_cast<size_t>(outer) * inner;
  const size_t tiles = divide_up(time, 128), bytes = byte_size(state);
  const size_t places = tiles > 1 ? tiles * std::min(channels + kMostChannels, 2 * channels) : 0;
  const size_t sums = op == Op::kCotangent ? tiles * channels * bytes : 0;
  const size_t chained = 512 + places * 2 * bytes + sums;
  size_t piped = 0;
  for (const PipedKernel& k : kPipedKernels) {
    if (k.state_bytes() != byte_size(state)) continue;
    for (const PipedA way : {PipedA::kRows, PipedA::kFixed, PipedA::kRuns}) {
      piped = std::max(piped, piped_tiling(op, k, way, outer, time, inner).bytes);
    }
  }
  // A piece tells 16 bytes for each lane.
  size_t resident = 0;
  if (state == DType::kF32 && outer * time * inner <= kMostResident && time > kShortestPiece) {
    const int64_t lanes = outer * (inner < 32 ? inner : divide_up(inner, int64_t{32}) * 32);
    resident = static_cast<size_t>(lanes * divide_up(time, int64_t{kShortestPiece})) * 16;
  }
  return std::max({general_tiling(op, outer, time, inner, state).bytes, chained, piped, resident});
}

// n channels of a longer call never need more than n times this.
constexpr size_t workspace_bytes_per_channel(int64_t time, DType state) {
  // Tiles are no shorter than those of general.cuh with 32 lanes, and lanes less than twice the
  // channels.
  const size_t bytes = byte_size(state), tiles = divide_up(time, 8 * steps_per_thread(bytes));
  const size_t packets = std::max(4 * bytes, size_t{16} * packets_per_map(bytes));
  // Those of piped.cuh are shorter, and places a quarter more than channels at most.
  size_t piped = 0;
  for (const PipedKernel& k : kPipedKernels) {
    if (k.state_bytes() != byte_size(state)) continue;
    for (const PipedA way : {PipedA::kRows, PipedA::kFixed, PipedA::kRuns}) {
      if (!piped_takes(way, k.a_bytes, k.b_bytes, k.vector)) continue;
      const int steps = std::min(k.ring(Op::kScan, way).steps, k.ring(Op::kCotangent, way).steps);
      const size_t shortest = divide_up(time, steps);
      piped = std::max(piped, shortest * bytes * (way == PipedA::kFixed ? 7 : 5) / 2);
    }
  }
  return 1024 + std::max(tiles * 2 * (packets + bytes), piped);
}

}  // namespace jax_scan
