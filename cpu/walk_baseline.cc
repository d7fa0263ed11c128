// The walk of a tile, compiled for every machine of the platform.
#include "cpu/common.h"

#define JAX_SCAN_VECTOR_BYTES 16
#define JAX_SCAN_F16C 0

namespace jax_scan::cpu {
namespace {
#include "cpu/simd.inc"
//
#include "cpu/rows.inc"
//
#include "cpu/steps.inc"
//
#include "cpu/lines.inc"
//
#include "cpu/walk.inc"
//
#include "cpu/chunks.inc"
//
#include "cpu/turns.inc"
//
#include "cpu/tile.inc"
}  // namespace

bool run_baseline(const Problem& problem, const Blocks& blocks, const Tile& tile) {
  return run(problem, blocks, tile);
}

}  // namespace jax_scan::cpu
