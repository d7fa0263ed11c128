// The CPU kernel: a Problem is cut into tiles, and every tile is walked through time by one thread.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace jax_scan::cpu {

// A group of neighbouring channels, counted over (outer, inner) in row-major order.
struct Tile {
  int64_t channel;
  int64_t width;
};

// How a Problem is cut into tiles. A channel's arithmetic does not depend on the tile that it is
// in, so neither the number of threads nor the order of the tiles changes a bit of the result.
class Tiling {
 public:
  Tiling(const Problem& problem, int64_t threads);

  int64_t count() const { return count_; }
  Tile tile(int64_t index) const;

 private:
  int64_t inner_;  // channels in a group: an outer index's inner ones, or all where inner is small
  int64_t groups_;
  int64_t width_;  // channels in a tile; no tile straddles two groups
  int64_t per_group_;
  int64_t count_;
};

// What the kernel is compiled for. All give the same bits, for all do the same operations in the
// same order.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
bool supported(InstructionSet set);  // by this build and this machine
InstructionSet best_instruction_set();

// Walks one tile through all time. False when there was no memory for its buffers. Any thread, any
// order.
bool run_tile(const Problem& problem, const Tile& tile, InstructionSet set);

}  // namespace jax_scan::cpu
