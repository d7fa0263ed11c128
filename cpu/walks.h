// The walk of a tile, compiled for each instruction set in a file of its own.
#pragma once

#include "core/problem.h"
#include "cpu/kernel.h"

namespace jax_scan::cpu {

bool run_baseline(const Problem& problem, const Blocks& blocks, const Tile& tile);
#if defined(__x86_64__)
bool run_avx2(const Problem& problem, const Blocks& blocks, const Tile& tile);
bool run_avx512(const Problem& problem, const Blocks& blocks, const Tile& tile);
#endif

}  // namespace jax_scan::cpu
