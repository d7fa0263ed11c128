// The CPU kernel: a Problem is cut into tiles, and a tile is walked through time by one thread, or
// block by block by several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/problem.h"
#include "cpu/handoff.h"

namespace jax_scan::cpu {

// A call of fewer elements is done before a second thread has begun, or is slower with it, since
// the caches of two cores then hold parts of it.
inline constexpr int64_t kSerialElements = int64_t{1} << 17;

// Steps [t, t + chunks * steps) of some channels. Its chunks are walked side by side, each in lanes
// of its own; with one chunk, lanes are channels.
struct Block {
  int64_t t = 0;
  int64_t chunks = 1;
  int64_t steps = 0;

  int64_t end() const { return t + chunks * steps; }
  friend bool operator==(const Block&, const Block&) = default;
};

// How time is cut into blocks: where channels are too few for vectors or threads, or where da is
// summed over outer indices, which are walked in turns then, block by block. This depends on the
// Problem alone, as the bits of the result depend on it.
class Blocks {
 public:
  explicit Blocks(const Problem& problem);

  bool cut() const { return steps_ > 0; }
  // Steps are walked one by one: each channel's bits are those of the written-out loop.
  bool plain() const { return !cut() || in_turns_; }
  bool in_turns() const { return in_turns_; }
  // The maps of single-chunk blocks are composed too, for several threads to share the blocks. A
  // step's states are whole lines of memory then, which the walk rests on.
  bool composed() const { return !plain() && chunks_ == 1; }
  int64_t count() const { return full_ + rest_count_; }
  Block operator[](int64_t index) const;                            // in the order of memory
  int64_t most_elements() const { return chunks_ * (steps_ + 1); }  // of a channel in a block

 private:
  int64_t chunks_ = 1;
  int64_t steps_ = 0;
  bool in_turns_ = false;
  int64_t full_ = 0;
  int64_t rest_count_ = 0;
  Block rest_[3];
};

// Whether the kernel sums da over the runs that the problem asks for: runs of outer indices, or of
// enough neighbouring channels whose steps lie side by side. The answer depends on sizes and the
// state's type alone.
// What has been released must stay true: exported programs ask for what it was when they were made.
bool sums_da(const Problem& problem);

// A group of neighbouring channels, counted over (outer, inner) in row-major order; of several
// outer indices where da is summed over these. Tiles of the same channels share their blocks of
// time.
struct Tile {
  int64_t channel = 0;  // the first one, of the first outer index
  int64_t width = 0;
  int64_t outers = 1;
  // Of the blocks, and for each outer index a handoff. None where all are this tile's, unless outer
  // indices take turns.
  Claims* claims = nullptr;
  Handoff* handoff = nullptr;
  int64_t sharers = 1;  // tiles of these channels
  // Where da is summed over runs of channels: so many of a run are summed here, none of which is
  // another tile's, into arrays (outer, time, inner / part).
  int64_t part = 1;
  Output sums;
};

// How a Problem is cut into tiles. Neither the number of threads nor the order of the tiles changes
// a bit of the result: a channel's arithmetic does not depend on the tile that it is in.
class Tiling {
 public:
  Tiling(const Problem& problem, int64_t threads);

  // False when there was no memory for what tiles share. They must not be walked then.
  bool ready() const {
    return (part_ == 1 || sums_.data) && (!shared_ || (values_ && handoffs_ && claims_));
  }
  int64_t count() const { return count_; }
  Tile tile(int64_t index) const;
  const Blocks& blocks() const { return blocks_; }
  // Once all tiles have been walked: sums over runs from those over their parts.
  void finish(const Problem& problem) const;

 private:
  void share(const Problem& problem, int64_t sharers);

  Blocks blocks_;
  int64_t inner_;  // channels in a group: an outer index's inner ones, or all where inner is small
  int64_t groups_;
  int64_t width_;  // channels in a tile; no tile straddles two groups
  int64_t per_group_;
  int64_t outers_ = 1;  // outer indices of a group
  bool shared_ = false;
  int64_t sharers_ = 1;
  int64_t count_;
  struct alignas(64) CacheLine {
    std::byte bytes[64];
  };
  std::unique_ptr<CacheLine[]> values_;  // of the handoffs
  std::unique_ptr<Handoff[]> handoffs_;
  std::unique_ptr<Claims[]> claims_;  // of the tiles that share their blocks
  int64_t part_ = 1;                  // of a run of channels over which da is summed
  Output sums_;
  std::unique_ptr<std::byte[]> sums_of_parts_;  // in the state's type, where runs have several
};

// What the kernel is compiled for. All give the same bits, for all do the same operations in the
// same order.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
bool supported(InstructionSet set);  // by this build and this machine
InstructionSet best_instruction_set();

// Walks one tile. False when there was no memory for its buffers. Any thread.
bool run_tile(const Problem& problem, const Blocks& blocks, const Tile& tile, InstructionSet set);

}  // namespace jax_scan::cpu
